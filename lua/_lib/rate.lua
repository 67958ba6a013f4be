-- rate: the measured time between two grants to waiters of a class, for Retry-After and eta.
-- Field of rate: 'last|grants|window|promised'; grants and the time in which they came both fade with a time constant, and time
-- in which nobody waited, the server was frozen, or no card was up does not count: an outage says nothing of the load.
local rate = {}

local FADE_MS = 30000
local UNKNOWN_MS = 5000

local known, changed = {}, {}

local function read(class)
  local r = known[class]
  if not r then
    local last, grants, window, promised =
      string.match(redis.call('HGET', key('rate'), class) or '', '^(%d+)|([%d.]+)|([%d.]+)|(%d+)$')
    r = { math.max(num(last), THAWED), num(grants), num(window), num(promised) }
    known[class] = r
  end
  return unpack(r)
end

local function write(class, ...) known[class], changed[class] = { ... }, true end

at_end[#at_end + 1] = function()
  for class in pairs(changed) do
    redis.call('HSET', key('rate'), class, string.format('%.0f|%.4f|%.1f|%.0f', unpack(known[class])))
  end
end

local function faded(last, grants, window)
  local kept = math.exp(-math.max(NOW - last, 0) / FADE_MS)
  return grants * kept, window * kept + FADE_MS * (1 - kept)
end

function rate.waiting_begins(class)
  local _, grants, window, promised = read(class)
  write(class, NOW, grants, window, promised)
end

-- A card came up: what went before is not waiting for a place on it.
function rate.serving_begins(k)
  for class in string.gmatch(k.cl, '%S+') do
    if redis.call('HEXISTS', key('rate'), class) == 1 then rate.waiting_begins(class) end
  end
end

function rate.granted(class)
  local last, grants, window, promised = read(class)
  grants, window = faded(last, grants, window)
  write(class, NOW, grants + 1, window, promised)
end

-- Milliseconds between two grants as of now; nil before the first.
function rate.interval(class)
  local last, grants, window = read(class)
  if grants < 0.01 then return nil end
  grants, window = faded(last, grants, window)
  return math.max(window / math.max(grants, 0.01), 1)
end

-- When a refused caller may come back: each one is promised a place of its own, so that they do not all return at once. Never
-- later than the queue needs to drain.
function rate.promise(class, waiting)
  local interval = rate.interval(class) or UNKNOWN_MS
  local last, grants, window, promised = read(class)
  promised = math.min(math.max(promised, NOW) + interval, NOW + (waiting + 1) * interval)
  write(class, last, grants, window, promised)
  return promised - NOW
end
