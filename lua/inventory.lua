-- inventory: the cards with their sums, the live leases, the classes of waiting jobs, the models. Reads only.
-- Guarantee: one instant; nothing is changed.
-- Fence: none.
-- KEYS: meta. ARGV: arguments {cards, leases, queue, models}, settings. Returns: ok {...} + packed hosted models
-- Cost: the cards of the pool, their leases, the classes.
-- include: base transitions rate lease job
local told, blobs = {}, {}
local ids = redis.call('ZRANGE', key('cards'), 0, -1)
if A.cards then
  told.cards = {}
  for _, id in ipairs(ids) do
    local flat, raw = redis.call('HGETALL', key('card', id)), {}
    for i = 1, #flat, 2 do
      if flat[i] ~= 'an' then raw[flat[i]] = flat[i + 1] end
    end
    local k = lease.card(id)
    local running = 0
    for _, packed in ipairs(redis.call('HVALS', key('leases', id))) do
      running = running + cmsgpack.unpack(packed)[lease.STARTED]
    end
    blobs[#blobs + 1] = redis.call('GET', key('host', id)) or ''
    told.cards[#told.cards + 1] = {
      id = id, raw = raw, sum = lease.sum(k), open = lease.is_open(k) and 1 or 0, running = running,
      left_ms = num(redis.call('ZSCORE', key('sessions'), 'c:' .. id)) - NOW,
    }
  end
end
if A.leases then
  told.leases = {}
  for _, id in ipairs(ids) do
    local all = redis.call('HGETALL', key('leases', id))
    for i = 1, #all, 2 do
      told.leases[#told.leases + 1] = { id = all[i], card = id, record = cmsgpack.unpack(all[i + 1]) }
    end
  end
end
if A.queue then
  told.queue = {}
  for _, class in ipairs(redis.call('SMEMBERS', key('classes'))) do
    local first = redis.call('ZRANGE', key('q', class), 0, 0)[1]
    local model = string.match(class, '^[^@]+')
    told.queue[#told.queue + 1] = {
      model = class, waiting = redis.call('ZCARD', key('q', class)), bytes = num(redis.call('HGET', key('limits'), 'bm:' .. model)),
      oldest = first and num(redis.call('HGET', key('job', first), 'ct')) or 0, interval = rate.interval(class) or 0,
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
