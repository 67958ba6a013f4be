-- limits: waiting jobs and payload bytes, by pool, model and tenant. Fields of limits: p, m:<model>, t:<tenant>, each two doubles.
local limits = { models = {}, tenants = {}, is_changed = false }

-- The counters of the pool, a model and a tenant, read together, once.
function limits.of(model, tenant)
  local m, t = limits.models[model], limits.tenants[tenant]
  if not m or not t then
    local packed = redis.call('HMGET', key('limits'), 'p', 'm:' .. model, 't:' .. tenant)
    limits.pool = limits.pool or limits.read('p', packed[1])
    m, t = m or limits.read('m:' .. model, packed[2]), t or limits.read('t:' .. tenant, packed[3])
    limits.models[model], limits.tenants[tenant] = m, t
  end
  return limits.pool, m, t
end

function limits.read(scope, packed)
  local waiting, bytes = 0, 0
  if packed then waiting, bytes = struct.unpack('<dd', packed) end
  return { scope = scope, waiting = waiting, bytes = bytes }
end

-- So many waiting jobs and bytes more of one job's kind.
function limits.add(j, waiting, bytes)
  if not limits.is_changed then
    limits.is_changed = true
    at_end[#at_end + 1] = limits.write
  end
  local p, m, t = limits.of(j.m, j.t)
  p.waiting, m.waiting, t.waiting = p.waiting + waiting, m.waiting + waiting, t.waiting + waiting
  p.bytes, m.bytes, t.bytes = p.bytes + bytes, m.bytes + bytes, t.bytes + bytes
end

-- A scope without jobs goes away.
function limits.write()
  local flat, gone = {}, {}
  local function put(l)
    if l.waiting == 0 and l.bytes == 0 then
      gone[#gone + 1] = l.scope
    else
      flat[#flat + 1] = l.scope
      flat[#flat + 1] = struct.pack('<dd', l.waiting, l.bytes)
    end
  end
  put(limits.pool)
  for _, l in pairs(limits.models) do put(l) end
  for _, l in pairs(limits.tenants) do put(l) end
  if #gone > 0 then redis.call('HDEL', key('limits'), unpack(gone)) end
  if #flat > 0 then redis.call('HSET', key('limits'), unpack(flat)) end
  limits.is_changed = false
end
