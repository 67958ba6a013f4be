-- sweep: what time does. Deadlines and ended sessions, a few at a time, by whoever calls; nothing depends on one process.
local sweep = {}

-- Jobs that a card holds but has not handed out go back when it stops granting. Returns true when there are more.
function sweep.unclaim(k)
  for _ = 1, MOVE_LIMIT do
    local id = redis.call('LPOP', place.ready(k))
    if not id then return false end
    local j = job.load(id)
    local record = j and j[S] == 'leased' and j[D] == k.id and lease.get(k.id, j[L])
    if record and record.handed == 0 then
      lease.release(k, j[L], record)
      agent.requeue(id, j, 'unclaimed')
      place.requeued(id, j)
    end
  end
  return redis.call('EXISTS', place.ready(k)) == 1
end

function sweep.clear_head(k)
  if k.hj == '' then return end
  local head = job.load(k.hj)
  if head then job.set(k.hj, head, 'rv', nil) end
  lease.clear_head(k)
end

function sweep.hosts_ready(j)
  for _, card in ipairs(redis.call('SMEMBERS', key('on', j[C]))) do
    local k = lease.card(card, j[M])
    if lease.is_open(k) and lease.model(k, j[M]).slots > 0 then return true end
  end
  return false
end

-- The published bound for a big job behind a stream of small ones: the greatest head start of others, the time in which
-- it may be passed, the longest run that must end before it, and a grace of two beats.
function sweep.longest_wait_ms()
  return 9 * BOOST_MS + MAX_PASSING_MS + LONGEST_RUN_MS + 2 * BEAT_MS
end

-- Which clock of a job has passed, as an event and its words.
function sweep.passed(id, j)
  if j[CT] + j[TL] <= NOW then
    return 'total_timeout', 'job ' .. id .. ': not done within its total limit of ' .. int(j[TL]) .. ' ms'
  end
  if j[S] == 'running' and j[RS] + j[RL] <= NOW then
    return 'run_timeout', 'job ' .. id .. ': ran for more than its limit of ' .. int(j[RL]) .. ' ms'
  end
  if j[S] ~= 'running' and j[WS] + j[WL] <= NOW then
    if j[S] == 'queued' and not sweep.hosts_ready(j) then
      return 'no_ready_card', 'job ' .. id .. ': no card that hosts ' .. j[C] .. ' was ready within ' .. int(j[WL]) .. ' ms'
    end
    local words = 'job ' .. id .. ': waited ' .. int(NOW - j[CT]) .. ' ms, more than its limit of ' .. int(j[WL]) .. ' ms'
    if j.rv and j[WL] < sweep.longest_wait_ms() then
      words = words .. '; memory was being set aside for it, which can take ' .. int(sweep.longest_wait_ms()) .. ' ms'
    end
    return 'wait_timeout', words
  end
  if j.ab and j.ab <= NOW then return 'cancel', 'job ' .. id .. ': its last client left' end
  return nil
end

function sweep.deadlines()
  local due = redis.call('ZRANGEBYSCORE', key('deadlines'), '-inf', int(NOW), 'LIMIT', 0, MOVE_LIMIT)
  for _, id in ipairs(due) do
    local j = job.load(id)
    if not j or not job.is_live(j) then
      redis.call('ZREM', key('deadlines'), id)
    else
      local event, words = sweep.passed(id, j)
      if not event then
        job.schedule(id, j)
      else
        local extra = { detail = words, force = event == 'run_timeout' or (event == 'total_timeout' and j[S] == 'running') }
        if event == 'wait_timeout' or event == 'no_ready_card' then
          extra.retry_ms = rate.promise(j[C], redis.call('ZCARD', key('q', j[C])))
        end
        agent.end_job(id, j, event, extra)
      end
    end
  end
  return #due == MOVE_LIMIT
end

-- The jobs of a card whose agent is gone run again; its bytes stay leased until it registers with a fresh measurement.
-- Returns true when there are more. event: how those end that ran; a loss unless the agent left in order.
function sweep.lost_jobs(k, event)
  local moved = 0
  local all = lease.all(k)
  for i = 1, #all, 2 do
    local id = all[i + 1].job
    local j = job.load(id)
    if j and j[L] == all[i] and (j[S] == 'leased' or j[S] == 'running') then
      if moved == MOVE_LIMIT then return true end
      moved = moved + 1
      if j[S] == 'running' then
        agent.requeue_suspect(id, j, event or 'agent_lost')
      else
        agent.requeue(id, j, 'unheld')
      end
      if j[S] == 'queued' then place.requeued(id, j) end
    elseif j and j[L] == all[i] then
      -- Settled already: nobody will report the end of this run, so its key is not held for it.
      local next_id, n = settle.lease_ended(id, j)
      if next_id then place.requeued(next_id, n) end
    end
  end
  return false
end

function sweep.card_lost(k)
  if k.sid ~= '' then
    k.sid, k.ag, k.sm = '', 'lost', 0
    lease.save(k)
    redis.call('HSET', key('card', k.id), 'rs', 'its agent was not heard for a session')
    redis.call('DEL', place.ready(k))
    redis.call('HINCRBY', META, 'stamp', 1)
    sweep.clear_head(k)
    pool.count('sessions_lost')
  end
  return sweep.lost_jobs(k)
end

-- A synchronous job without a key has nobody left who could take its answer when its gateway is gone.
function sweep.gateway_lost(worker)
  local name = key('gwj', worker)
  for _, id in ipairs(redis.call('SRANDMEMBER', name, MOVE_LIMIT)) do
    redis.call('SREM', name, id)
    local j = job.load(id)
    if j and job.is_live(j) then agent.end_job(id, j, 'cancel', { detail = 'job ' .. id .. ': its gateway was lost' }) end
  end
  return redis.call('EXISTS', name) == 1
end

function sweep.sessions()
  local ended = redis.call('ZRANGEBYSCORE', key('sessions'), '-inf', int(NOW), 'LIMIT', 0, 1)
  if not ended[1] then return false end
  local kind, name = string.sub(ended[1], 1, 1), string.sub(ended[1], 3)
  local more
  if kind == 'c' then
    more = sweep.card_lost(lease.card(name))
  else
    more = sweep.gateway_lost(name)
  end
  if not more then redis.call('ZREM', key('sessions'), ended[1]) end
  return true
end

-- Records, results and names that nobody needs any more.
function sweep.expired()
  local more = settle.expire_results()
  local jobs = redis.call('ZRANGEBYSCORE', key('expiry'), '-inf', int(NOW), 'LIMIT', 0, MOVE_LIMIT)
  for _, id in ipairs(jobs) do
    local j = job.load(id)
    if j and settle.is_on_card(j) then
      -- Whoever waits under its key waits for the end of this run: it is remembered until then.
      redis.call('ZADD', key('expiry'), int(NOW + DELIVERED_TTL_MS), id)
      redis.call('PEXPIRE', key('job', id), int(2 * DELIVERED_TTL_MS + RECORD_SLACK_MS))
    else
      redis.call('ZREM', key('expiry'), id)
      redis.call('ZREM', key('jobs'), id)
      job.delete(id)
    end
  end
  return more or #jobs == MOVE_LIMIT
end

-- A model or card is known for a while after its last session.
function sweep.unknown()
  local oldest = int(NOW - KNOWN_TTL_MS)
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', key('models'), '-inf', oldest, 'LIMIT', 0, 4)) do
    redis.call('ZREM', key('models'), name)
    for _, version in ipairs(redis.call('HKEYS', key('model', name))) do redis.call('HDEL', key('rate'), name .. '@' .. version) end
    redis.call('DEL', key('model', name))
    redis.call('HDEL', key('rate'), name)
  end
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('cards'), '-inf', oldest, 'LIMIT', 0, 1)) do
    local k = lease.card(id)
    if k.sid == '' then
      for class in string.gmatch(k.cl, '%S+') do redis.call('SREM', key('on', class), id) end
      redis.call('DEL', key('card', id), key('leases', id), key('ready', id), key('host', id), key('wake', id))
      redis.call('ZREM', key('cards'), id)
      lease.forget(k)
    end
  end
end
