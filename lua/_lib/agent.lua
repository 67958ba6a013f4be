-- agent: what the three calls of an agent share. Session, starts, sample, reports, hand-outs.
local agent = { came_back = {} }

local INLINE_INPUTS = 65536

-- The fence of every agent call: this session holds the card.
function agent.holds_card(k) return k.sid ~= '' and k.sid == A.session end

function agent.renew(k) redis.call('ZADD', key('sessions'), int(NOW + SESSION_MS), 'c:' .. k.id) end

-- Leases whose work is off the card, by the word of its agent.
function agent.drop_leases(k)
  local all = lease.all(k)
  for i = 1, #all, 2 do
    local record = all[i + 1]
    lease.release(k, all[i], record)
    local j = job.load(record.job)
    if j and j[L] == all[i] then
      local next_id, n = settle.lease_ended(record.job, j)
      if next_id then place.requeued(next_id, n) end
    end
  end
end

-- A run clock starts when the agent says that the run began, as an age, so that it has a Redis time.
function agent.starts(k, starts)
  for _, start in ipairs(starts or {}) do
    local record = lease.get(k.id, start.lease)
    if record and record.job == start.job and record.started == 0 then
      record.started = 1
      lease.put(k, start.lease, record)
      local j = job.load(start.job)
      if j and j[L] == start.lease and job.set_state(start.job, j, 'start') then
        j[RS] = math.max(NOW - math.max(start.age, 0), record.granted)
        job.schedule(start.job, j)
        job.tell(start.job, j, true)
        pool.count('runs')
        if j[AT] > 1 then pool.count('runs_again') end
      end
    end
  end
end

-- One stamped reading. foreign and overrun are computed against the leases held at this instant; a reading that is older
-- than the last one, or than the moment at which the card went down, says nothing new.
function agent.sample(k, s)
  if not s or s.read < math.max(k.sm, k.sf) then return end
  -- A reading from the future would count as fresh for too long and shut out the ones after it.
  s.read = math.min(s.read, NOW)
  local seen, leased_external = 0, 0
  local foreign
  if s.by_lease then
    for id, used in pairs(s.by_lease) do
      local record = lease.get(k.id, id)
      if record then seen = seen + math.min(record.bytes, used) end
    end
    foreign = math.max(0, s.used - s.own - seen)
  else
    leased_external = k.ex + k.li
    foreign = math.min(math.max(s.used - s.own, 0), math.max(k.fo, s.used - s.own - leased_external))
    foreign = math.max(foreign, 0)
  end
  local overrun = math.max(0, s.allocated - k.re - k.jb)
  k.sm, k.to, k.dr, k.cx, k.fo, k.ov = s.read, s.total, s.driver, s.context, foreign, overrun
  k.us, k.ow, k.al, k.rv = s.used, s.own, s.allocated, s.reserved
  lease.save(k)
end

-- Puts a job back into the queue at its old place. The wait clock of one that ran starts anew; of one that was only moved it
-- goes on, so that moves between cards neither outlast its limit nor cost it its age.
function agent.requeue(id, j, event)
  local has_run = j[S] == 'running'
  if not job.set_state(id, j, event) then return false end
  pool.count('requeued.' .. event)
  if has_run then j[WS] = NOW end
  j[D], j[L], j[GR], j[RS] = '', '', 0, 0
  job.enqueue(id, j)
  job.schedule(id, j)
  redis.call('DEL', key('ev', id))
  job.tell(id, j, true)
  return true
end

-- Crashes and losses: alone after a suspicion, failed after two crashes alone or one loss more than three.
function agent.requeue_suspect(id, j, event, was_alone)
  if event == 'oom' then
    if j.oo then return settle.job(id, j, 'oom_again', { detail = 'job ' .. id .. ': out of memory, also alone on the card' }) end
    job.set(id, j, 'oo', 1)
    job.set(id, j, 'al', 1)
  elseif event == 'crash' then
    local crashes = (j.cr or 0) + (was_alone and 1 or 0)
    job.set(id, j, 'cr', crashes)
    job.set(id, j, 'al', 1)
    if crashes >= 2 then
      return settle.job(id, j, 'crashed_alone', { detail = 'job ' .. id .. ': its process died twice while it ran alone' })
    end
  elseif event == 'agent_lost' then
    local losses = (j.ls or 0) + 1
    job.set(id, j, 'ls', losses)
    if losses > 3 then
      return settle.job(id, j, 'lost_for_good', { detail = 'job ' .. id .. ': its agents were lost ' .. int(losses) .. ' times' })
    end
    if losses == 3 then job.set(id, j, 'al', 1) end
  end
  return agent.requeue(id, j, event)
end

agent.FAILURES = {
  model_error = true, rejected_by_model = true, non_finite = true, output_too_large = true, run_timeout = true, internal = true,
}

-- Jobs that reports brought back into the queue; placed when the sample that came with the reports is known.
function agent.place_back()
  for _, back in ipairs(agent.came_back) do
    if back.card ~= '' then
      place.pump(back.card)
      pool.wake(back.card, 'work')
    end
    if back.j[S] == 'queued' then place.requeued(back.id, back.j) end
  end
  agent.came_back = {}
end

-- Leases and records of all reports, read together.
function agent.load_reported(k, reports)
  local leases, ids = {}, {}
  for i, r in ipairs(reports) do
    leases[i], ids[i] = r.lease, r.job
  end
  lease.load_all(k, leases)
  job.load_all(ids)
end

-- Takes one report under the fence of its lease id. Returns ok, settled (the callers had their answer) or stale.
-- A stored result lies under the lease, not under the job: what a fenced-off agent stores never meets the answer.
function agent.report(k, r)
  local stored = r.result_bytes and key('up', r.lease)
  local record = lease.get(k.id, r.lease)
  local id = r.job
  local j = record and record.job == id and job.load(id)
  if record and record.job == id then lease.release(k, r.lease, record) end
  if not j or j[L] ~= r.lease or not job.is_live(j) then
    if stored then redis.call('DEL', stored) end
    if not j or j[L] ~= r.lease then return 'stale' end
    local next_id, n = settle.lease_ended(id, j)
    if next_id then agent.came_back[#agent.came_back + 1] = { id = next_id, j = n, card = '' } end
    return 'settled'
  end
  local extra = { peak = r.peak or 0, run_ms = r.run_ms or 0, result = nil, stored = nil }
  if r.kind == 'succeeded' then
    if r.result_index then
      extra.result = ARGV[r.result_index]
    else
      extra.stored = stored
    end
    -- A call that failed half-way may have taken it already.
    if stored and redis.call('EXISTS', stored) == 0 then extra.stored = key('res', id) end
    if extra.result or (stored and redis.call('EXISTS', extra.stored) == 1) then
      settle.job(id, j, 'succeed', extra)
    else
      agent.requeue(id, j, 'unheld')
    end
  elseif r.kind == 'failed' then
    extra.detail, extra.field = tostring(r.detail or ''), r.field
    local event = agent.FAILURES[r.code] and r.code or 'internal'
    settle.job(id, j, event == 'internal' and 'failed_inside' or event, extra)
  elseif r.kind == 'oom' then
    agent.requeue_suspect(id, j, 'oom')
  elseif r.kind == 'crashed' then
    agent.requeue_suspect(id, j, 'crash', r.alone)
  elseif r.kind == 'killed' then
    agent.requeue(id, j, 'killed')
  else
    agent.requeue(id, j, 'give_back')
  end
  if job.is_live(j) then agent.came_back[#agent.came_back + 1] = { id = id, j = j, card = record.recall } end
  return 'ok'
end

-- An idle card takes over what is leased elsewhere and not handed out, and asks for what was handed out and has not started.
function agent.take_over(k)
  if not pool.has_lease_id() then return end
  for class in string.gmatch(k.cl, '%S+') do
    for _, other in ipairs(redis.call('SMEMBERS', key('on', class))) do
      if other ~= k.id then
        local o = lease.card(other)
        local id = o.nj > 1 and redis.call('LINDEX', place.ready(o), -1)
        local j = id and job.load(id)
        if j and j[S] == 'leased' and lease.model(k, j[M]).slots > 0 and (j[C] == class) then
          local record = lease.get(other, j[L])
          if record and record.handed == 0 and not lease.obstacle(k, id, j) then
            redis.call('RPOP', key('ready', other))
            lease.release(o, j[L], record)
            return place.grant(k, id, j, 'takeover')
          end
        elseif not id and o.nj > 1 then
          agent.recall(k, o, class)
        end
      end
    end
  end
end

-- One at a time: a card that asks again while its wish is under way would drain the other.
function agent.recall(k, o, class)
  local all = lease.all(o)
  local chosen, chosen_lease
  for i = 1, #all, 2 do
    local record = all[i + 1]
    if record.handed > 0 and record.started == 0 and record.ending == 0 then
      if record.recall == k.id then return end
      local id = record.job
      local j = not chosen and record.recall == '' and job.load(id)
      if j and j[C] == class and j[L] == all[i] and not lease.obstacle(k, id, j) then chosen, chosen_lease = record, all[i] end
    end
  end
  if chosen then
    chosen.recall = k.id
    lease.put(o, chosen_lease, chosen)
    pool.wake(o.id)
  end
end

-- The inputs of jobs that are handed out, one string for each; empty where they would be more than 64 KiB together.
function agent.inputs(handed)
  local bytes, names, places, inputs = 0, {}, {}, {}
  for i, j in ipairs(handed) do
    inputs[i] = ''
    if bytes + j[PB] <= INLINE_INPUTS then
      bytes = bytes + j[PB]
      names[#names + 1] = key('pay', j.id)
      places[#places + 1] = i
    end
  end
  local found = #names > 0 and redis.call('MGET', unpack(names)) or {}
  for n, i in ipairs(places) do inputs[i] = found[n] or '' end
  return inputs
end

-- A reply that hands out jobs: their ids, and for each its record and its inputs as further strings.
function agent.answer(handed, verdicts, more)
  local ids, blobs, inputs = {}, {}, agent.inputs(handed)
  for i, j in ipairs(handed) do
    ids[i] = j.id
    blobs[2 * i - 1], blobs[2 * i] = job.pack(j), inputs[i]
  end
  return reply('ok', { jobs = ids, verdicts = verdicts, more = more }, unpack(blobs))
end

-- Takes up to `want` jobs off the list of a card: what was granted before, then what this call has granted.
function agent.take(k, want)
  local ids = redis.call('LPOP', key('ready', k.id), want) or {}
  if k.fresh[1] then
    local fresh = k.fresh
    local few = math.min(want - #ids, #fresh)
    for i = 1, few do ids[#ids + 1] = fresh[i] end
    k.fresh = { unpack(fresh, few + 1) }
  end
  local leases = {}
  for i, j in ipairs(job.load_all(ids)) do leases[i] = j and j[L] or '' end
  lease.load_all(k, leases)
  return ids
end

-- Hands out up to `want` leased jobs and remembers them under this sequence number.
function agent.hand_out(k, want, verdicts, more)
  local handed, answer = {}, {}
  if k.ag ~= 'draining' then
    want = math.min(want, MOVE_LIMIT)
    if want > 0 and k.nj == 0 and lease.is_open(k) then agent.take_over(k) end
    while #handed < want do
      local asked = want - #handed
      local ids = agent.take(k, asked)
      for _, id in ipairs(ids) do agent.hand(k, id, handed, answer) end
      if #ids < asked then break end
    end
  end
  if #handed == MOVE_LIMIT and redis.call('EXISTS', place.ready(k)) == 1 then more = true end
  more = more and 1 or 0
  k.sq, k.answer = A.seq, cmsgpack.pack({ verdicts = verdicts, jobs = answer, more = more })
  lease.save(k)
  return agent.answer(handed, verdicts, more)
end

function agent.hand(k, id, handed, answer)
  local j = job.load(id)
  local record = j and j[S] == 'leased' and j[D] == k.id and lease.get(k.id, j[L])
  if not record or record.handed ~= 0 then return end
  record.handed = A.seq
  lease.put(k, j[L], record)
  j[AT], j[VE] = j[AT] + 1, lease.model(k, j[M]).version
  job.save(id, j)
  handed[#handed + 1] = j
  answer[#answer + 1] = id
  answer[#answer + 1] = j[L]
end

-- The same number gets the same answer; a lower one is stale. Returns a reply, or nil when the call is new.
function agent.repeated(k)
  if A.seq > k.sq then return nil end
  if A.seq < k.sq then return reply('stale_seq', { last = k.sq }) end
  local answer = cmsgpack.unpack(redis.call('HGET', key('card', k.id), 'an'))
  local handed = {}
  for i = 1, #answer.jobs, 2 do
    local j = lease.get(k.id, answer.jobs[i + 1]) and job.load(answer.jobs[i])
    if j and j[L] == answer.jobs[i + 1] then handed[#handed + 1] = j end
  end
  return agent.answer(handed, answer.verdicts, answer.more)
end

-- Ends a live job for its callers, wherever it is. The bytes of a handed-out job stay until the agent reports its end.
function agent.end_job(id, j, event, extra)
  local k
  if j[S] ~= 'queued' then
    k = lease.card(j[D])
    local record = lease.get(j[D], j[L])
    if record and record.handed == 0 then
      lease.release(k, j[L], record)
      redis.call('LREM', place.ready(k), 1, id)
    elseif record then
      record.ending = math.max(record.ending, extra.force and 2 or 1)
      lease.put(k, j[L], record)
      pool.wake(j[D])
      k = nil
    end
  end
  settle.job(id, j, event, extra)
  if k then
    place.pump(k.id)
    pool.wake(k.id, 'work')
  end
end
