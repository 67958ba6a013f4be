-- recover: the first connection that finds another server behind the pool's name audits once and starts a new incarnation.
-- Guarantee: once for each run of a server, whoever comes first. The round that an audit begins goes on with the gateways' beats.
-- Fence: the run id.
-- KEYS: meta. ARGV: arguments {run_id}, settings, lease ids (may be none). Returns: ok {incarnation, changed, mended}
-- Cost: as audit, once per server run.
-- include: base arguments pool limits transitions rate lease job settle place agent sweep mend
local known = redis.call('HGET', META, 'run')
local incarnation = num(redis.call('HGET', META, 'inc'))
if known == A.run_id then return reply('ok', { incarnation = incarnation, changed = 0 }) end
pool.begin_writes()
for _, id in ipairs(redis.call('ZRANGE', key('cards'), 0, -1)) do mend.sums(id) end
redis.call('HSET', META, 'run', A.run_id, 'inc', int(incarnation + 1))
mend.begin()
mend.step()
return reply('ok', { incarnation = incarnation + 1, changed = 1, mended = mend.found() })
