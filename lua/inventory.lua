-- inventory: the cards with their sums, the live leases, the classes of waiting jobs, the models. Reads only.
-- Guarantee: one instant; nothing is changed.
-- Fence: none.
-- KEYS: meta. ARGV: arguments {cards, leases, queue, models}, settings. Returns: ok {...} + packed hosted models
-- Cost: the cards of the pool, their leases, the classes.
-- include: base arguments pool limits transitions rate lease job
local told, blobs = {}, {}
local ids = redis.call('ZRANGE', key('cards'), 0, -1)
if A.cards then
  told.cards = {}
  for _, id in ipairs(ids) do
    local k, flat = lease.card(id), redis.call('HGETALL', key('card', id))
    local raw, running = {}, 0
    for field, value in pairs(k) do
      if #field == 2 or field == 'sid' then raw[field] = value end
    end
    for i = 1, #flat, 2 do
      if flat[i] ~= 'an' and flat[i] ~= 'r' then raw[flat[i]] = raw[flat[i]] or flat[i + 1] end
    end
    local all = lease.all(k)
    for i = 2, #all, 2 do running = running + all[i].started end
    blobs[#blobs + 1] = redis.call('GET', key('host', id)) or ''
    local grantable, reserved, _, withheld, usable = lease.sum(k)
    told.cards[#told.cards + 1] = {
      id = id, raw = raw, sum = { grantable = grantable, reserved = reserved, withheld = withheld, usable = usable },
      open = lease.is_open(k) and 1 or 0, running = running,
      left_ms = num(redis.call('ZSCORE', key('sessions'), 'c:' .. id)) - NOW,
    }
  end
end
if A.leases then
  told.leases = {}
  for _, id in ipairs(ids) do
    local all = lease.all(lease.card(id))
    for i = 1, #all, 2 do
      told.leases[#told.leases + 1] = { id = all[i], card = id, record = all[i + 1] }
    end
  end
end
if A.queue then
  told.queue = {}
  for _, class in ipairs(redis.call('SMEMBERS', key('classes'))) do
    local first = redis.call('ZRANGE', key('q', class), 0, 0)[1]
    local oldest = first and job.load(first)
    local _, by_model = limits.of(string.match(class, '^[^@]+'), '')
    told.queue[#told.queue + 1] = {
      model = class, waiting = redis.call('ZCARD', key('q', class)), bytes = by_model.bytes, oldest = oldest and oldest[CT] or 0,
      interval = rate.interval(class) or 0,
    }
  end
end
if A.models then
  told.models = {}
  local named = redis.call('ZRANGE', key('models'), 0, -1, 'WITHSCORES')
  for i = 1, #named, 2 do
    local versions, since, flat = {}, 0, redis.call('HGETALL', key('model', named[i]))
    for v = 1, #flat, 2 do
      if flat[v] == '@since' then
        since = num(flat[v + 1])
      else
        blobs[#blobs + 1] = flat[v + 1]
        versions[#versions + 1] = #blobs
      end
    end
    told.models[#told.models + 1] = {
      name = named[i], seen = num(named[i + 1]), since = since, versions = versions,
    }
  end
end
return reply('ok', told, unpack(blobs))
