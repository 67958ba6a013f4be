-- base: settings, key names, numbers, Redis time, the reply. Every script includes it first.
-- KEYS[1] is always the pool's meta key; ARGV[1] the arguments, ARGV[2] the settings as doubles and the operation's name, ARGV[3]
-- fresh lease ids.
local META = KEYS[1]
local PREFIX = string.sub(META, 1, -5)
local MOVE_LIMIT = 16

-- The same names in the same order as scheduler/store.py, held equal by tests/ledger/test_scripts.py.
local SETTINGS = { struct.unpack('<ddddddddddddddddddddds', ARGV[2]) }
local SESSION_MS, BEAT_MS, ABANDON_GRACE_MS, QUEUE_JOBS, QUEUE_BYTES, MODEL_JOBS, MODEL_BYTES, TENANT_JOBS, TENANT_BYTES,
  RESULT_BUDGET, KEY_TTL_MS, RESULT_TTL_MS, DELIVERED_TTL_MS, DEAD_LETTER_TTL_MS, TOMBSTONE_TTL_MS, KNOWN_TTL_MS, PACKS,
  BOOST_MS, MAX_PASSED, MAX_PASSING_MS, LONGEST_RUN_MS, OPERATION = unpack(SETTINGS)

-- Names: the same as scheduler/keys.py, held equal by tests/ledger/test_keys.py.
local function key(kind, name)
  if name then return PREFIX .. kind .. ':' .. name end
  return PREFIX .. kind
end

-- The arguments, by name: arguments.lua.
local A

-- '%d' because tostring keeps 14 digits and Redis 7.2.0 to 7.2.4 write multiples of 1e8 as 2e+8.
local function int(number) return string.format('%d', number) end
local function num(text) return tonumber(text or 0) or 0 end

-- Time that neither stops nor goes back: when TIME is behind the last value, the offset grows by the difference. Field
-- `clock:<layout>` of meta, its name the number of the layout of all records (scheduler/records.py), as doubles: last value, offset, THAWED (when a frozen server was last seen to be alive again), ENTERED and
-- ENTERED_PART (the last submit that was stored, and its place within its millisecond).
local CLOCK, CLOCK_FIELD = '<ddddd', 'clock:1'
local NOW, LAST, OFFSET, THAWED, ENTERED, ENTERED_PART
do
  local t = redis.call('TIME')
  local clock = redis.call('HGET', META, CLOCK_FIELD)
  LAST, OFFSET, THAWED, ENTERED, ENTERED_PART = 0, 0, 0, 0, 0
  if clock then LAST, OFFSET, THAWED, ENTERED, ENTERED_PART = struct.unpack(CLOCK, clock) end
  NOW = t[1] * 1000 + math.floor(t[2] / 1000) + OFFSET
  if NOW < LAST then
    OFFSET = OFFSET + LAST - NOW
    NOW = LAST
  end
end

-- What is written once, when the script replies: records and sums that one call changes several times. Records of jobs come
-- late: should the script fail before, a job is as it was, and the audit that follows every failure puts it where it says. Only
-- the indexes that call a job settled come after its record: before, they would hide from the audit that it lives.
local at_end = { records = nil, settled = nil }

-- A reply: status, then one msgpack map, then binary strings that must not pass through text decoding.
local function reply(status, fields, ...)
  local at = 1
  while at_end[at] do
    at_end[at]()
    at = at + 1
  end
  if at_end.records then at_end.records() end
  if at_end.settled then at_end.settled() end
  fields = fields or {}
  fields.now = NOW
  return { status, cmsgpack.pack(fields), ... }
end
