-- place: which job gets which card. Submit and grant-on-release use the same rules.
local place = { granted_now = 0, taken = {}, passed = {} }

local SCAN = 16

-- Grants a job on a card; the caller has checked obstacle(). Returns false when no fresh lease id is left.
function place.grant(k, id, j, event)
  local lease_id = pool.take_lease_id()
  if not lease_id then return false end
  if j[S] == 'queued' and not j.is_new then place.take_from_queue(id, j) end
  j[D], j[L], j[GR], j[LB] = k.id, lease_id, NOW, lease.reserve(k, lease_id, id, j)
  job.set_state(id, j, event or 'grant')
  if #k.fresh == 0 then at_end[#at_end + 1] = function() place.ready(k) end end
  k.fresh[#k.fresh + 1] = id
  place.granted_now = place.granted_now + 1
  return true
end

-- Granted jobs leave their queue together, when the pump is done.
function place.take_from_queue(id, j)
  local ids = place.taken[j[C]] or {}
  place.taken[j[C]], ids[#ids + 1] = ids, id
  job.ends_waiting(id, j)
end

-- The name of the list of what a card was granted and has not been handed, after what this call has granted was added.
function place.ready(k)
  local name = key('ready', k.id)
  if #k.fresh > 0 then
    redis.call('RPUSH', name, unpack(k.fresh))
    k.fresh = {}
  end
  return name
end

-- Those of the cards that host its class on which a job fits now, in the order in which it would take them.
function place.candidates(hosts, id, j)
  local fitting = {}
  for _, card in ipairs(hosts) do
    local k = lease.card(card, j[M])
    if lease.is_open(k) and lease.model(k, j[M]).slots > 0 and not lease.obstacle(k, id, j) then fitting[#fitting + 1] = k end
  end
  if #fitting > 1 then table.sort(fitting, place.comes_first) end
  return fitting
end

function place.comes_first(x, y)
  local gx, gy = lease.sum(x), lease.sum(y)
  if gx ~= gy then
    if PACKS == 1 then return gx < gy end
    return gx > gy
  end
  if x.nj ~= y.nj then return x.nj < y.nj end
  return x.id < y.id
end

-- The queues of the classes that a card hosts.
function place.queues(k)
  local names = {}
  for class in string.gmatch(k.cl, '%S+') do names[#names + 1] = key('q', class) end
  return names
end

function place.has_waiters(k)
  local names = place.queues(k)
  return #names > 0 and redis.call('EXISTS', unpack(names)) > 0
end

-- The heads of the classes that a card hosts, merged by effective time; the first `few` are enough where one class waits.
function place.heads(k, few)
  local waiting, ids = {}, {}
  for _, name in ipairs(place.queues(k)) do
    local part = redis.call('ZRANGE', name, 0, few - 1)
    if #part > 0 then
      waiting[#waiting + 1] = name
      ids = part
    end
  end
  if #waiting > 1 then return place.merged(waiting) end
  return ids, waiting[1]
end

function place.merged(names)
  local list, ids = {}, {}
  for _, name in ipairs(names) do
    local part = redis.call('ZRANGE', name, 0, SCAN - 1, 'WITHSCORES')
    for i = 1, #part, 2 do list[#list + 1] = { id = part[i], score = num(part[i + 1]) } end
  end
  table.sort(list, function(x, y)
    if x.score ~= y.score then return x.score < y.score end
    return x.id < y.id
  end)
  for i, head in ipairs(list) do ids[i] = head.id end
  return ids
end

-- Smaller jobs may pass a head that does not fit, until it was passed often or long enough. Then bytes accumulate for it on
-- this card, where leases that a run clock bounds can free enough.
function place.wants_reservation(k, j)
  if k.hj ~= '' or (j.rv and j.rv ~= k.id) then return false end
  local _, _, room, withheld = lease.sum(k)
  if j[N] > room - withheld then return false end
  return j.al ~= nil or (j.np or 0) >= MAX_PASSED or NOW - j[WS] >= MAX_PASSING_MS
end

function place.reserve_for(k, id, j)
  local bytes = j[N]
  if j.al then
    local _, _, room = lease.sum(k)
    bytes = room
  end
  lease.set_head(k, id, bytes)
  job.set(id, j, 'rv', k.id)
end

-- Gives waiting jobs what is free on a card, oldest effective time first. Returns true when it stopped at its limit.
function place.pump(card)
  local k = lease.card(card)
  if k.nj >= k.sl or not lease.is_open(k) then return false end
  place.passed = {}
  local more = place.fill(k)
  for class, ids in pairs(place.taken) do
    job.leave_queue(class, ids)
    rate.granted(class, #ids)
  end
  place.taken = {}
  return more
end

function place.fill(k)
  local few = math.min(SCAN, math.max(1, k.sl - k.nj))
  local ids, queue = place.heads(k, few)
  if place.fill_from(k, ids) then return true end
  -- The one queue was read as far as slots were free, and some of its heads did not fit.
  if queue and few < SCAN and #ids == few and k.nj < k.sl then
    return place.fill_from(k, redis.call('ZRANGE', queue, few, SCAN - 1))
  end
  return false
end

-- Records are read as far as slots are free: of many classes only the first heads of all.
function place.fill_from(k, ids)
  for at = 1, #ids, SCAN do
    if k.nj >= k.sl then return false end
    if place.fill_part(k, { unpack(ids, at, math.min(at + SCAN - 1, #ids)) }) then return true end
  end
  return false
end

function place.fill_part(k, ids)
  local heads = job.load_all(ids)
  for i, id in ipairs(ids) do
    if k.nj >= k.sl then return false end
    if place.granted_now >= MOVE_LIMIT then return true end
    local j = heads[i]
    if j and j[S] == 'queued' and lease.model(k, j[M]).slots > 0 then
      local obstacle = lease.obstacle(k, id, j)
      if not obstacle then
        if not place.grant(k, id, j) then return true end
        for passed_id, p in pairs(place.passed) do job.set(passed_id, p, 'np', (p.np or 0) + 1) end
      elseif obstacle == 'bytes' then
        if place.wants_reservation(k, j) then
          place.reserve_for(k, id, j)
        else
          place.passed[id] = j
        end
      end
    end
  end
  return false
end

-- The best of the cards that fit on which nobody waits: there a job starts at once and passes nobody.
function place.without_waiters(fitting)
  for _, k in ipairs(fitting) do
    if not place.has_waiters(k) then return k end
  end
  return nil
end

-- Places a new job: at once where nobody waits, else into the queue, and whoever is before it comes first.
function place.submitted(id, j, fitting, free)
  if free then
    j.is_new = true
    place.grant(free, id, j)
    pool.wake(free.id, 'work')
    return
  end
  job.enqueue(id, j)
  for _, k in ipairs(fitting) do
    place.pump_and_wake(k)
    if j[S] ~= 'queued' then return end
  end
end

function place.pump_and_wake(k)
  local before = place.granted_now
  place.pump(k.id)
  if place.granted_now > before then pool.wake(k.id, 'work') end
end

-- A job that came back into the queue: the best card for it, in order with the waiters there.
function place.requeued(id, j)
  local best = place.candidates(redis.call('SMEMBERS', key('on', j[C])), id, j)[1]
  if best then place.pump_and_wake(best) end
end
