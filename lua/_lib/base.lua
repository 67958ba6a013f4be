-- base: arguments, key names, numbers, Redis time. Every script includes it first.
-- KEYS[1] is always the pool's meta key; ARGV[1] is the msgpack map of arguments, ARGV[2] the msgpack map of settings.
local META = KEYS[1]
local PREFIX = string.sub(META, 1, -5)
local A = cmsgpack.unpack(ARGV[1])
local CFG = cmsgpack.unpack(ARGV[2])
local MOVE_LIMIT = 16

-- Names: the same as scheduler/keys.py, held equal by tests/ledger/test_keys.py.
local function key(kind, name)
  if name then return PREFIX .. kind .. ':' .. name end
  return PREFIX .. kind
end

-- '%.0f' because tostring keeps 14 digits and Redis 7.2.0 to 7.2.4 write multiples of 1e8 as 2e+8.
local function int(number) return string.format('%.0f', number) end
local function num(text) return tonumber(text or 0) or 0 end

-- Time that neither stops nor goes back: when TIME is behind the last value, the offset grows by the difference.
-- THAWED is when a frozen server was last seen to be alive again.
local NOW, LAST, OFFSET, THAWED
do
  local t = redis.call('TIME')
  local raw = num(t[1]) * 1000 + math.floor(num(t[2]) / 1000)
  local m = redis.call('HMGET', META, 'off', 'last', 'thaw')
  OFFSET, LAST, THAWED = num(m[1]), num(m[2]), num(m[3])
  NOW = raw + OFFSET
  if NOW < LAST then
    OFFSET = OFFSET + LAST - NOW
    NOW = LAST
  end
end

local function note_time()
  redis.call('HSET', META, 'last', int(NOW), 'off', int(OFFSET))
  -- Nobody ran a script for half a session: the server was frozen or alone. One TTL of grace, or the first sweep after
  -- it would declare everybody dead who could not have reached us.
  if LAST > 0 and NOW - LAST > CFG.session_ms / 2 then
    local sessions = redis.call('ZRANGE', key('sessions'), 0, -1, 'WITHSCORES')
    for i = 1, #sessions, 2 do
      local kept = math.max(num(sessions[i + 1]), LAST) + (NOW - LAST) + CFG.session_ms
      redis.call('ZADD', key('sessions'), 'XX', int(math.min(kept, NOW + 2 * CFG.session_ms)), sessions[i])
    end
    THAWED = NOW
    redis.call('HSET', META, 'thaw', int(NOW))
    redis.call('HINCRBY', key('stats'), 'graces', 1)
  end
end

-- The first write of a script that must also run when memory is full: Redis lets the rest of a script through after a
-- write that can only free memory (the field does not exist).
local begun = false
local function begin_writes()
  if begun then return end
  begun = true
  redis.call('HDEL', META, '_')
  note_time()
end

-- What is written once, when the script replies: counters and the sums of cards, which many jobs of one call change.
-- Should the script fail before, the audit that follows every failure mends the sums.
local at_end = {}
local counted, tallied = {}, {}

local function count(name, by) counted[name] = (counted[name] or 0) + (by or 1) end

-- Counters by pool, model and tenant; a field that returns to zero goes away.
local function tally(field, by) tallied[field] = (tallied[field] or 0) + by end

at_end[1] = function()
  for name, by in pairs(counted) do redis.call('HINCRBY', key('stats'), name, int(by)) end
  for field, by in pairs(tallied) do
    if by ~= 0 and redis.call('HINCRBY', key('limits'), field, int(by)) == 0 then redis.call('HDEL', key('limits'), field) end
  end
end

-- A reply: status, then one msgpack map, then binary strings that must not pass through text decoding.
local function reply(status, fields, ...)
  for _, write in ipairs(at_end) do write() end
  fields = fields or {}
  fields.now = NOW
  return { status, cmsgpack.pack(fields), ... }
end

local function wake(card)
  local name = key('wake', card)
  if redis.call('LPUSH', name, '1') > 1 then
    redis.call('LTRIM', name, 0, 0)
  else
    redis.call('PEXPIRE', name, int(CFG.session_ms))
  end
end

-- Fresh random ids for leases, made by the caller because Lua cannot make any.
local ids_used = 0
local function has_lease_id() return (ids_used + 1) * 32 <= #(ARGV[3] or '') end

local function take_lease_id()
  if not has_lease_id() then return nil end
  ids_used = ids_used + 1
  return string.sub(ARGV[3], ids_used * 32 - 31, ids_used * 32)
end
