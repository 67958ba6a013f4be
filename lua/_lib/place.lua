-- place: which job gets which card. Submit and grant-on-release use the same rules.
local place = {}

local SCAN = 16
local granted_now = 0

-- Grants a job on a card; the caller has checked obstacle(). Returns false when no fresh lease id is left.
function place.grant(k, id, j, event)
  local lease_id = take_lease_id()
  if not lease_id then return false end
  if j.stood then
    job.dequeue(id, j)
    rate.granted(j.c)
  end
  local bytes = lease.reserve(k, lease_id, id, j)
  job.set_state(id, j, event or 'grant', 'd', k.id, 'l', lease_id, 'gr', int(NOW), 'lb', int(bytes))
  redis.call('RPUSH', key('ready', k.id), id)
  granted_now = granted_now + 1
  return true
end

-- The cards on which a job fits now, in the order in which it would take them.
function place.candidates(id, j)
  local fitting = {}
  for _, card in ipairs(redis.call('SMEMBERS', key('on', j.c))) do
    local k = lease.card(card)
    if lease.is_open(k) and lease.model(k, j.m).slots > 0 and not lease.obstacle(k, id, j) then fitting[#fitting + 1] = k end
  end
  local pack = CFG.policy == 'pack'
  table.sort(fitting, function(x, y)
    local gx, gy = lease.sum(x).grantable, lease.sum(y).grantable
    if gx ~= gy then
      if pack then return gx < gy end
      return gx > gy
    end
    if x.nj ~= y.nj then return x.nj < y.nj end
    return x.id < y.id
  end)
  return fitting
end

local function has_waiters(k)
  for class in string.gmatch(k.cl, '%S+') do
    if redis.call('EXISTS', key('q', class)) == 1 then return true end
  end
  return false
end

-- The heads of the classes that a card hosts, merged by effective time.
local function heads(k)
  local list = {}
  for class in string.gmatch(k.cl, '%S+') do
    local part = redis.call('ZRANGE', key('q', class), 0, SCAN - 1, 'WITHSCORES')
    for i = 1, #part, 2 do list[#list + 1] = { id = part[i], score = num(part[i + 1]), class = class } end
  end
  table.sort(list, function(x, y)
    if x.score ~= y.score then return x.score < y.score end
    return x.id < y.id
  end)
  return list
end

local HEAD_FIELDS = { 's', 'm', 'c', 'n', 'np', 'ws', 'rv', 'al', 't', 'sc' }

local function load_head(id)
  local v = redis.call('HMGET', key('job', id), unpack(HEAD_FIELDS))
  local j = {}
  for i, name in ipairs(HEAD_FIELDS) do j[name] = v[i] or nil end
  j.stood = true
  return j
end

-- Smaller jobs may pass a head that does not fit, until it was passed often or long enough. Then bytes accumulate for it on
-- this card, where leases that a run clock bounds can free enough.
local function wants_reservation(k, id, j)
  if k.hj ~= '' or (j.rv and j.rv ~= k.id) then return false end
  local s = lease.sum(k)
  if num(j.n) > s.room - s.withheld then return false end
  return j.al ~= nil or num(j.np) >= CFG.max_passed or NOW - num(j.ws) >= CFG.max_passing_ms
end

local function reserve_for(k, id, j)
  local bytes = num(j.n)
  if j.al then bytes = lease.sum(k).room end
  lease.set_head(k, id, bytes)
  job.set(id, j, 'rv', k.id)
end

-- Gives waiting jobs what is free on a card, oldest effective time first. Returns true when it stopped at its limit.
function place.pump(card)
  local k = lease.card(card)
  if not lease.is_open(k) then return false end
  local passed = {}
  for _, head in ipairs(heads(k)) do
    if k.nj >= k.sl then return false end
    if granted_now >= MOVE_LIMIT then return true end
    local j = load_head(head.id)
    if j.s == 'queued' and lease.model(k, j.m).slots > 0 then
      local obstacle = lease.obstacle(k, head.id, j)
      if not obstacle then
        if not place.grant(k, head.id, j) then return true end
        for _, p in ipairs(passed) do
          p.j.np = int(num(p.j.np) + 1)
          redis.call('HSET', key('job', p.id), 'np', p.j.np)
        end
      elseif obstacle == 'bytes' then
        if wants_reservation(k, head.id, j) then
          reserve_for(k, head.id, j)
        else
          passed[#passed + 1] = { id = head.id, j = j }
        end
      end
    end
  end
  return false
end

-- The best of the cards that fit on which nobody waits: there a job starts at once and passes nobody.
function place.without_waiters(fitting)
  for _, k in ipairs(fitting) do
    if not has_waiters(k) then return k end
  end
  return nil
end

-- Places a new job: at once where nobody waits, else into the queue, and whoever is before it comes first.
function place.submitted(id, j, fitting, free)
  if free then
    place.grant(free, id, j)
    wake(free.id)
    return
  end
  job.enqueue(id, j)
  for _, k in ipairs(fitting) do
    local before = granted_now
    place.pump(k.id)
    if granted_now > before then wake(k.id) end
    if redis.call('HGET', key('job', id), 's') ~= 'queued' then return end
  end
end

-- A job that came back into the queue: the best card for it, in order with the waiters there.
function place.requeued(id, j)
  for _, k in ipairs(place.candidates(id, j)) do
    local before = granted_now
    place.pump(k.id)
    if granted_now > before then wake(k.id) end
    return
  end
end
