-- gateway_leave: a gateway worker shuts down in order. That is not its clients leaving: what runs goes on, to be joined by key.
-- Guarantee: no job is cancelled for it.
-- Fence: none (the worker's name is random).
-- KEYS: meta, sessions. ARGV: arguments {worker}, settings. Returns: ok
-- Cost: two keys.
-- include: base arguments pool
pool.begin_writes()
redis.call('ZREM', KEYS[2], 'g:' .. A.worker)
redis.call('DEL', key('st', A.worker), key('gwj', A.worker))
return reply('ok')
