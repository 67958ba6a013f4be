-- mend: finds and puts right what a script that failed half-way leaves behind. The sums of cards are lease.audit's.
-- A round looks at the cards first, then at all jobs from the newest to the oldest, a few at a time, until it has seen all
-- that live. Field `mend` of meta is where it goes on: '' at its beginning, 'created|seen of that instant|live ones seen'.
local mend = { moved_now = 0, known = {} }

local LOOK = 64

-- One fault by its name. A pool in order has none: each is drift.
function mend.fault(kind)
  mend.known[kind] = (mend.known[kind] or 0) + 1
  mend.moved_now = mend.moved_now + 1
  pool.count('mended.' .. kind)
  pool.count('drift')
end

-- What this call has put right, by name.
function mend.found() return mend.known end

-- The sums of a card; lease.audit itself counts their drift.
function mend.sums(id)
  local drift = lease.audit(id)
  if drift ~= 0 then mend.known.sums = (mend.known.sums or 0) + drift end
  return drift
end

-- Begins a new round; one that is on begins anew.
function mend.begin() redis.call('HSET', META, 'mend', '') end

-- A lease that no agent has and no job knows would keep its bytes until the card registers anew; a job that was granted and
-- stands in no list would never be handed out.
function mend.card(k)
  -- A lost card keeps its leases until it registers.
  if k.sid == '' then return end
  if not redis.call('ZSCORE', key('sessions'), 'c:' .. k.id) then
    agent.renew(k)
    mend.fault('session')
  end
  local name, listed = place.ready(k), {}
  if redis.call('TYPE', name).ok == 'list' then
    for _, id in ipairs(redis.call('LRANGE', name, 0, -1)) do listed[id] = true end
  else
    redis.call('DEL', name)
  end
  local all = lease.all(k)
  for i = 1, #all, 2 do
    if mend.moved_now >= MOVE_LIMIT then return end
    local record = all[i + 1]
    if record.handed == 0 then
      local j = job.load(record.job)
      if not (j and j[S] == 'leased' and j[L] == all[i]) then
        lease.release(k, all[i], record)
        mend.fault('lease')
      elseif not listed[record.job] then
        redis.call('RPUSH', name, record.job)
        pool.wake(k.id)
        mend.fault('ready')
      end
    end
  end
end

-- The head of a class that is no waiter would be looked at by each grant, for ever.
function mend.class(class)
  for _, id in ipairs(redis.call('ZRANGE', key('q', class), 0, SCAN - 1)) do
    local j = job.load(id)
    if not (j and j[S] == 'queued') then
      redis.call('ZREM', key('q', class), id)
      mend.fault('ghost')
    end
  end
  if redis.call('EXISTS', key('q', class)) == 0 then redis.call('SREM', key('classes'), class) end
end

-- Its answer was stored before the script failed, or its inputs are gone: it cannot run again. Returns true when it ended.
function mend.end_here(id, j)
  j[ST] = 0
  job.save(id, j)
  if j[S] ~= 'queued' and redis.call('EXISTS', key('res', id)) == 1 then
    return settle.job(id, j, 'succeed', { stored = key('res', id) })
  end
  if redis.call('EXISTS', key('pay', id)) == 1 then return false end
  return settle.job(id, j, 'lost_for_good', { detail = 'job ' .. id .. ': a fault of the ledger lost its inputs' })
end

function mend.is_blocked(id, j)
  local former = job.load(j.bl)
  return former and former.nx == id and former[L] ~= '' and lease.get(former[D], former[L])
end

-- Which index a live job is missing from: its fault, or nil.
function mend.misplaced(id, j)
  if j[S] == 'queued' then
    if j.bl then return not mend.is_blocked(id, j) and 'blocked' or nil end
    return not redis.call('ZSCORE', key('q', j[C]), id) and 'queue' or nil
  end
  local record = j[L] ~= '' and lease.get(j[D], j[L])
  return not (record and record.job == id) and 'run' or nil
end

function mend.live(id, j)
  local kind = mend.misplaced(id, j)
  if kind then
    mend.fault(kind)
    if mend.end_here(id, j) then return end
    if kind == 'run' then
      agent.requeue(id, j, 'unheld')
    else
      job.unblock(id, j)
    end
    place.requeued(id, j)
  end
  if not redis.call('ZSCORE', key('deadlines'), id) then
    mend.fault('deadline')
    job.schedule(id, j)
  end
end

-- The record of a settled job that nobody would forget, and whose callers may not have been told.
function mend.settled(id, j)
  if redis.call('ZSCORE', key('expiry'), id) then return end
  mend.fault('record')
  local ttl = j[S] == 'failed' and DEAD_LETTER_TTL_MS or RESULT_TTL_MS
  redis.call('ZADD', key('expiry'), int(NOW + ttl), id)
  for _, kind in ipairs({ 'job', 'pay', 'res', 'ev' }) do redis.call('PEXPIRE', key(kind, id), int(ttl + RECORD_SLACK_MS)) end
  job.tell(id, j, false, job.pack(j))
end

-- Returns whether the job lives.
function mend.job(id)
  local j = job.load(id)
  if j and job.is_live(j) then
    mend.live(id, j)
    return true
  elseif j then
    mend.settled(id, j)
  elseif not redis.call('ZSCORE', key('expiry'), id) then
    redis.call('ZREM', key('jobs'), id)
    redis.call('ZREM', key('deadlines'), id)
    -- What cannot be read may be of another release: for its operator it lies as long as a dead letter.
    for _, kind in ipairs({ 'job', 'pay', 'ev' }) do redis.call('PEXPIRE', key(kind, id), int(DEAD_LETTER_TTL_MS)) end
    mend.fault('index')
  end
  return false
end

-- One record that cannot be put right must not keep the others from it.
function mend.try_job(id)
  local is_done, lives = pcall(mend.job, id)
  if is_done then return lives end
  mend.fault('failed')
  redis.log(redis.LOG_WARNING, 'job ' .. id .. ' cannot be mended: ' .. tostring(type(lives) == 'table' and lives.err or lives))
  return true
end

-- Counters of what waits, where so few live that one call may look at all of them.
function mend.limits()
  if redis.call('ZCARD', key('deadlines')) > LOOK then return end
  local is = {}
  for _, id in ipairs(redis.call('ZRANGE', key('deadlines'), 0, -1)) do
    local j = job.load(id)
    if j and job.is_live(j) then
      for _, scope in ipairs({ 'p', 'm:' .. j[M], 't:' .. j[T] }) do
        local l = is[scope] or { waiting = 0, bytes = 0 }
        is[scope] = l
        l.waiting, l.bytes = l.waiting + (j[S] == 'queued' and 1 or 0), l.bytes + j[PB]
      end
    end
  end
  local packed, flat = {}, redis.call('HGETALL', key('limits'))
  for scope, l in pairs(is) do packed[scope] = struct.pack('<dd', l.waiting, l.bytes) end
  for i = 1, #flat, 2 do
    if not packed[flat[i]] then
      redis.call('HDEL', key('limits'), flat[i])
      mend.fault('limits')
    elseif packed[flat[i]] == flat[i + 1] then
      packed[flat[i]] = nil
    end
  end
  for scope, value in pairs(packed) do
    redis.call('HSET', key('limits'), scope, value)
    mend.fault('limits')
  end
end

-- The bytes of what is stored, where it is few things.
function mend.stored()
  local members = {}
  for _, kind in ipairs(settle.KINDS) do
    if redis.call('ZCARD', key(kind)) > LOOK then return end
    for _, member in ipairs(redis.call('ZRANGE', key(kind), 0, -1)) do members[#members + 1] = member end
  end
  local bytes = 0
  for _, member in ipairs(members) do bytes = bytes + num(string.match(member, ':(%d+)$')) end
  if bytes ~= num(redis.call('HGET', META, 'rb')) then
    redis.call('HSET', META, 'rb', int(bytes))
    mend.fault('stored')
  end
end

-- Live jobs by the sizes of the indexes; nil where these disagree, so that a round has to look at every record.
function mend.live_number()
  local live = redis.call('ZCARD', key('jobs')) - redis.call('ZCARD', key('expiry'))
  return redis.call('ZCARD', key('deadlines')) == live and live or nil
end

function mend.jobs(at)
  local created, skip, live = string.match(at, '^(%d+)|(%d+)|(%d+)$')
  skip, live = num(skip), num(live)
  local all = redis.call('ZREVRANGEBYSCORE', key('jobs'), created or '+inf', '-inf', 'WITHSCORES', 'LIMIT', int(skip), LOOK)
  local expected = mend.live_number()
  for i = 1, #all, 2 do
    if expected and live >= expected then return nil end
    if mend.moved_now >= MOVE_LIMIT then return created .. '|' .. int(skip) .. '|' .. int(live) end
    if mend.try_job(all[i]) then live = live + 1 end
    skip = all[i + 1] == created and skip + 1 or 1
    created = all[i + 1]
  end
  if #all < 2 * LOOK then return nil end
  return created .. '|' .. int(skip) .. '|' .. int(live)
end

-- One step of the round that is on. Returns true when there are more.
function mend.step()
  local at = redis.call('HGET', META, 'mend')
  if not at then return false end
  if at == '' then
    for _, id in ipairs(redis.call('ZRANGE', key('cards'), 0, -1)) do mend.card(lease.card(id)) end
    for _, class in ipairs(redis.call('SMEMBERS', key('classes'))) do mend.class(class) end
  end
  if mend.moved_now < MOVE_LIMIT then
    local following = mend.jobs(at)
    if following then
      redis.call('HSET', META, 'mend', following)
    elseif mend.moved_now == 0 then
      mend.limits()
      mend.stored()
      redis.call('HDEL', META, 'mend')
    else
      -- What was moved has changed counters that are written at the end of this call: they are looked at in the next.
      redis.call('HSET', META, 'mend', '0|0|0')
    end
  end
  return redis.call('HEXISTS', META, 'mend') == 1
end
