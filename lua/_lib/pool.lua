-- pool: what every script may need of the pool's own keys: noting the time, counters, hints, lease ids.
local pool = { has_begun = false, counted = false, ids_used = 0 }

function pool.note_time()
  -- Nobody ran a script for half a session: the server was frozen or alone. One TTL of grace, or the first sweep after
  -- it would declare everybody dead who could not have reached us.
  if LAST > 0 and NOW - LAST > SESSION_MS / 2 then pool.give_grace() end
  redis.call('HSET', META, CLOCK_FIELD, struct.pack(CLOCK, NOW, OFFSET, THAWED, ENTERED, ENTERED_PART))
end

function pool.give_grace()
  local sessions = redis.call('ZRANGE', key('sessions'), 0, -1, 'WITHSCORES')
  for i = 1, #sessions, 2 do
    local kept = math.max(num(sessions[i + 1]), LAST) + (NOW - LAST) + SESSION_MS
    redis.call('ZADD', key('sessions'), 'XX', int(math.min(kept, NOW + 2 * SESSION_MS)), sessions[i])
  end
  THAWED = NOW
  redis.call('HINCRBY', key('stats'), 'graces', 1)
end

-- The first write of a script that must also run when memory is full: Redis lets the rest of a script through after a
-- write that can only free memory (the field does not exist).
function pool.begin_writes()
  if pool.has_begun then return end
  pool.has_begun = true
  redis.call('HDEL', META, '_')
  pool.note_time()
end

function pool.count(name, by)
  local counted = pool.counted
  if not counted then
    counted = {}
    pool.counted, at_end[#at_end + 1] = counted, pool.write_counted
  end
  counted[name] = (counted[name] or 0) + (by or 1)
end

function pool.write_counted()
  for name, by in pairs(pool.counted) do redis.call('HINCRBY', key('stats'), name, int(by)) end
  pool.counted = false
end

-- One hint at a time: 'work', to be claimed, or '1', for which the agent beats as well. That one is not lost to the other.
function pool.wake(card, what)
  local name = key('wake', card)
  if redis.call('LPUSH', name, what or '1') == 1 then
    redis.call('PEXPIRE', name, int(SESSION_MS))
  elseif what then
    redis.call('LPOP', name)
  else
    redis.call('LTRIM', name, 0, 0)
  end
end

-- Fresh random ids for leases, made by the caller because Lua cannot make any.
function pool.has_lease_id() return (pool.ids_used + 1) * 32 <= #(ARGV[3] or '') end

function pool.take_lease_id()
  local at = pool.ids_used * 32
  local id = string.sub(ARGV[3] or '', at + 1, at + 32)
  if id == '' then return nil end
  pool.ids_used = pool.ids_used + 1
  return id
end
