-- limits: waiting jobs and payload bytes, by pool, model and tenant. Fields of limits: p, m:<model>, t:<tenant>, each two doubles.
local limits = { scopes = {}, changes = {}, is_changed = false }

-- The counters of the pool, a model and a tenant, read together, once.
function limits.of(model, tenant)
  local scopes, m, t = limits.scopes, 'm:' .. model, 't:' .. tenant
  if not (scopes[m] and scopes[t]) then
    local packed = redis.call('HMGET', key('limits'), 'p', m, t)
    scopes.p = scopes.p or limits.read(packed[1])
    scopes[m], scopes[t] = scopes[m] or limits.read(packed[2]), scopes[t] or limits.read(packed[3])
  end
  return scopes.p, scopes[m], scopes[t]
end

function limits.read(packed)
  if not packed then return { waiting = 0, bytes = 0 } end
  local waiting, bytes = struct.unpack('<dd', packed)
  return { waiting = waiting, bytes = bytes }
end

-- So many waiting jobs and bytes more of one job's kind.
function limits.add(j, waiting, bytes)
  if not limits.is_changed then
    limits.is_changed, at_end[#at_end + 1] = true, limits.write
  end
  local of_model = limits.changes[j[M]]
  if not of_model then
    of_model = {}
    limits.changes[j[M]] = of_model
  end
  local change = of_model[j[T]]
  if change then
    change.waiting, change.bytes = change.waiting + waiting, change.bytes + bytes
  else
    of_model[j[T]] = { waiting = waiting, bytes = bytes }
  end
end

-- A scope without jobs goes away.
function limits.write()
  for model, of_model in pairs(limits.changes) do
    for tenant, change in pairs(of_model) do
      local p, m, t = limits.of(model, tenant)
      p.waiting, m.waiting, t.waiting = p.waiting + change.waiting, m.waiting + change.waiting, t.waiting + change.waiting
      p.bytes, m.bytes, t.bytes = p.bytes + change.bytes, m.bytes + change.bytes, t.bytes + change.bytes
    end
  end
  local flat, gone, used = {}, {}, 0
  for scope, l in pairs(limits.scopes) do
    if l.waiting == 0 and l.bytes == 0 then
      gone[#gone + 1] = scope
    else
      flat[used + 1], flat[used + 2] = scope, struct.pack('<dd', l.waiting, l.bytes)
      used = used + 2
    end
  end
  if gone[1] then redis.call('HDEL', key('limits'), unpack(gone)) end
  if flat[1] then redis.call('HSET', key('limits'), unpack(flat)) end
  limits.changes, limits.is_changed = {}, false
end
