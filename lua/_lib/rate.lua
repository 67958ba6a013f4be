-- rate: the measured time between two grants to waiters of a class, for Retry-After and eta.
-- Field of rate, as doubles: last, grants, window, promised; grants and the time in which they came both fade with a time constant, and time
-- in which nobody waited, the server was frozen, or no card was up does not count: an outage says nothing of the load.
local rate = { known = {}, changed = {}, is_changed = false }

local FADE_MS = 30000
local UNKNOWN_MS = 5000
local RATE = '<dddd'

function rate.read(class)
  local r = rate.known[class]
  if not r then
    local last, grants, window, promised = 0, 0, 0, 0
    local packed = redis.call('HGET', key('rate'), class)
    if packed then last, grants, window, promised = struct.unpack(RATE, packed) end
    r = { math.max(last, THAWED), grants, window, promised }
    rate.known[class] = r
  end
  return unpack(r)
end

function rate.write(class, ...)
  if not rate.is_changed then
    rate.is_changed, at_end[#at_end + 1] = true, rate.write_changed
  end
  rate.known[class], rate.changed[class] = { ... }, true
end

function rate.write_changed()
  for class in pairs(rate.changed) do redis.call('HSET', key('rate'), class, struct.pack(RATE, unpack(rate.known[class]))) end
end

function rate.faded(last, grants, window)
  local kept = math.exp(-math.max(NOW - last, 0) / FADE_MS)
  return grants * kept, window * kept + FADE_MS * (1 - kept)
end

function rate.waiting_begins(class)
  local _, grants, window, promised = rate.read(class)
  rate.write(class, NOW, grants, window, promised)
end

-- A card came up: what went before is not waiting for a place on it.
function rate.serving_begins(k)
  for class in string.gmatch(k.cl, '%S+') do
    if redis.call('HEXISTS', key('rate'), class) == 1 then rate.waiting_begins(class) end
  end
end

function rate.granted(class, number)
  local last, grants, window, promised = rate.read(class)
  grants, window = rate.faded(last, grants, window)
  rate.write(class, NOW, grants + number, window, promised)
end

-- Milliseconds between two grants as of now; nil before the first.
function rate.interval(class)
  local last, grants, window = rate.read(class)
  if grants < 0.01 then return nil end
  grants, window = rate.faded(last, grants, window)
  return math.max(window / math.max(grants, 0.01), 1)
end

-- When a refused caller may come back: each one is promised a place of its own, so that they do not all return at once. Never
-- later than the queue needs to drain.
function rate.promise(class, waiting)
  local interval = rate.interval(class) or UNKNOWN_MS
  local last, grants, window, promised = rate.read(class)
  promised = math.min(math.max(promised, NOW) + interval, NOW + (waiting + 1) * interval)
  rate.write(class, last, grants, window, promised)
  return promised - NOW
end
