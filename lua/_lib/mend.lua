-- mend: finds and puts right what a script that failed half-way leaves behind. The sums of cards are lease.audit's.
-- A round looks at the cards first, then at all jobs from the newest to the oldest, a few at a time, until it has seen all
-- that live. Field `mend` of meta is where it goes on: '' at its beginning, 'created|seen of that instant|live ones seen'.
local mend = {}

local LOOK = 64

local moved_now, found = 0, {}

-- One fault by its name. A pool in order has none: each is drift.
local function fault(kind)
  found[kind] = (found[kind] or 0) + 1
  moved_now = moved_now + 1
  count('mended.' .. kind)
  count('drift')
end

-- What this call has put right, by name.
function mend.found() return found end

-- The sums of a card; lease.audit itself counts their drift.
function mend.sums(id)
  local drift = lease.audit(id)
  if drift ~= 0 then found.sums = (found.sums or 0) + drift end
  return drift
end

-- Begins a new round; one that is on begins anew.
function mend.begin() redis.call('HSET', META, 'mend', '') end

-- A lease that no agent has and no job knows would keep its bytes until the card registers anew; a job that was granted and
-- stands in no list would never be handed out.
local function mend_card(k)
  -- A lost card keeps its leases until it registers.
  if k.sid == '' then return end
  if not redis.call('ZSCORE', key('sessions'), 'c:' .. k.id) then
    agent.renew(k)
    fault('session')
  end
  local name, listed = key('ready', k.id), {}
  if redis.call('TYPE', name).ok == 'list' then
    for _, id in ipairs(redis.call('LRANGE', name, 0, -1)) do listed[id] = true end
  else
    redis.call('DEL', name)
  end
  local all = redis.call('HGETALL', key('leases', k.id))
  for i = 1, #all, 2 do
    if moved_now >= MOVE_LIMIT then return end
    local record = cmsgpack.unpack(all[i + 1])
    local id = record[lease.JOB]
    if record[lease.HANDED] == 0 then
      local v = redis.call('HMGET', key('job', id), 's', 'l')
      if v[1] ~= 'leased' or v[2] ~= all[i] then
        lease.release(k, all[i], record)
        fault('lease')
      elseif not listed[id] then
        redis.call('RPUSH', name, id)
        wake(k.id)
        fault('ready')
      end
    end
  end
end

-- The head of a class that is no waiter would be looked at by each grant, for ever.
local function mend_class(class)
  for _, id in ipairs(redis.call('ZRANGE', key('q', class), 0, SCAN - 1)) do
    if redis.call('HGET', key('job', id), 's') ~= 'queued' then
      redis.call('ZREM', key('q', class), id)
      fault('ghost')
    end
  end
  if redis.call('EXISTS', key('q', class)) == 0 then redis.call('SREM', key('classes'), class) end
end

-- Its answer was stored before the script failed, or its inputs are gone: it cannot run again. Returns true when it ended.
local function end_here(id, j)
  if j.st then job.unset(id, j, 'st') end
  if j.s ~= 'queued' and redis.call('EXISTS', key('res', id)) == 1 then
    return settle.job(id, j, 'succeed', { stored = key('res', id) })
  end
  if redis.call('EXISTS', key('pay', id)) == 1 then return false end
  return settle.job(id, j, 'lost_for_good', { detail = 'job ' .. id .. ': a fault of the ledger lost its inputs' })
end

local function is_blocked(id, j)
  local b = redis.call('HMGET', key('job', j.bl), 'nx', 'd', 'l')
  return b[1] == id and b[2] and b[3] and redis.call('HEXISTS', key('leases', b[2]), b[3]) == 1
end

-- Which index a live job is missing from: its fault, or nil.
local function misplaced(id, v)
  if v.s == 'queued' then
    if v.bl then return not is_blocked(id, v) and 'blocked' or nil end
    return not redis.call('ZSCORE', key('q', v.c), id) and 'queue' or nil
  end
  local record = v.l and v.d and lease.get(v.d, v.l)
  return not (record and record[lease.JOB] == id) and 'run' or nil
end

local function mend_live(id, v)
  local kind = misplaced(id, v)
  if kind then
    fault(kind)
    local j = job.load(id)
    if end_here(id, j) then return end
    if kind == 'run' then
      agent.requeue(id, j, 'unheld')
    else
      job.unblock(id, j)
    end
    place.requeued(id, j)
  end
  if not redis.call('ZSCORE', key('deadlines'), id) then
    fault('deadline')
    job.schedule(id, job.load(id))
  end
end

-- The record of a settled job that nobody would forget, and whose callers may not have been told.
local function mend_settled(id)
  if redis.call('ZSCORE', key('expiry'), id) then return end
  fault('record')
  local j = job.load(id)
  local ttl = j.s == 'failed' and CFG.dead_letter_ttl_ms or CFG.result_ttl_ms
  redis.call('ZADD', key('expiry'), int(NOW + ttl), id)
  for _, kind in ipairs({ 'job', 'pay', 'res', 'ev' }) do redis.call('PEXPIRE', key(kind, id), int(ttl + RECORD_SLACK_MS)) end
  job.tell(id, j, false, 'o', cmsgpack.pack(settle.outcome(id, j)))
end

local JOB_FIELDS = { 's', 'd', 'l', 'c', 'bl' }

-- Returns whether the job lives.
local function mend_job(id)
  local v, values = {}, redis.call('HMGET', key('job', id), unpack(JOB_FIELDS))
  for i, name in ipairs(JOB_FIELDS) do v[name] = values[i] or nil end
  if job.is_live(v) then
    mend_live(id, v)
    return true
  elseif v.s then
    mend_settled(id)
  elseif not redis.call('ZSCORE', key('expiry'), id) then
    redis.call('ZREM', key('jobs'), id)
    fault('index')
  end
  return false
end

-- One record that cannot be put right must not keep the others from it.
local function try_job(id)
  local is_done, lives = pcall(mend_job, id)
  if is_done then return lives end
  fault('failed')
  redis.log(redis.LOG_WARNING, 'job ' .. id .. ' cannot be mended: ' .. tostring(type(lives) == 'table' and lives.err or lives))
  return true
end

-- Counters of what waits, where so few live that one call may look at all of them.
local function mend_limits()
  if redis.call('ZCARD', key('deadlines')) > LOOK then return end
  local is = {}
  local function add(field, by) is[field] = (is[field] or 0) + by end
  for _, id in ipairs(redis.call('ZRANGE', key('deadlines'), 0, -1)) do
    local v = redis.call('HMGET', key('job', id), 's', 'm', 't', 'pb')
    if job.is_live({ s = v[1] }) then
      for _, suffix in ipairs({ '', 'm:' .. v[2], 't:' .. v[3] }) do
        add('b' .. suffix, num(v[4]))
        if v[1] == 'queued' then add('w' .. suffix, 1) end
      end
    end
  end
  local flat = redis.call('HGETALL', key('limits'))
  for i = 1, #flat, 2 do
    add(flat[i], 0)
    if num(flat[i + 1]) == is[flat[i]] then is[flat[i]] = nil end
  end
  for field, value in pairs(is) do
    if value ~= num(redis.call('HGET', key('limits'), field)) then fault('limits') end
    if value == 0 then
      redis.call('HDEL', key('limits'), field)
    else
      redis.call('HSET', key('limits'), field, int(value))
    end
  end
end

-- The bytes of what is stored, where it is few things.
local function mend_stored()
  local members = {}
  for _, kind in ipairs(KINDS) do
    if redis.call('ZCARD', key(kind)) > LOOK then return end
    for _, member in ipairs(redis.call('ZRANGE', key(kind), 0, -1)) do members[#members + 1] = member end
  end
  local bytes = 0
  for _, member in ipairs(members) do bytes = bytes + num(string.match(member, ':(%d+)$')) end
  if bytes ~= num(redis.call('HGET', META, 'rb')) then
    redis.call('HSET', META, 'rb', int(bytes))
    fault('stored')
  end
end

-- Live jobs by the sizes of the indexes; nil where these disagree, so that a round has to look at every record.
local function live_number()
  local live = redis.call('ZCARD', key('jobs')) - redis.call('ZCARD', key('expiry'))
  return redis.call('ZCARD', key('deadlines')) == live and live or nil
end

local function mend_jobs(at)
  local created, skip, live = string.match(at, '^(%d+)|(%d+)|(%d+)$')
  skip, live = num(skip), num(live)
  local all = redis.call('ZREVRANGEBYSCORE', key('jobs'), created or '+inf', '-inf', 'WITHSCORES', 'LIMIT', int(skip), LOOK)
  local expected = live_number()
  for i = 1, #all, 2 do
    if expected and live >= expected then return nil end
    if moved_now >= MOVE_LIMIT then return created .. '|' .. int(skip) .. '|' .. int(live) end
    if try_job(all[i]) then live = live + 1 end
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
    for _, id in ipairs(redis.call('ZRANGE', key('cards'), 0, -1)) do mend_card(lease.card(id)) end
    for _, class in ipairs(redis.call('SMEMBERS', key('classes'))) do mend_class(class) end
  end
  if moved_now < MOVE_LIMIT then
    local following = mend_jobs(at)
    if following then
      redis.call('HSET', META, 'mend', following)
    elseif moved_now == 0 then
      mend_limits()
      mend_stored()
      redis.call('HDEL', META, 'mend')
    else
      -- What was moved has changed counters that are written at the end of this call: they are looked at in the next.
      redis.call('HSET', META, 'mend', '0|0|0')
    end
  end
  return redis.call('HEXISTS', META, 'mend') == 1
end
