-- leave: an agent has drained and ends. What it still held runs elsewhere; its card is known, without a session.
-- Guarantee: nothing counts as a crash or a loss; no lease of the session survives it.
-- Fence: session. KEYS: meta, card:<id>. ARGV: arguments {card, session}, settings, lease ids. Returns: ok {more} | lost
-- Cost: the leases of the card, at most 16 jobs moved; called again while more is 1.
-- include: base arguments pool limits transitions rate lease job settle place agent sweep
local k = lease.card(A.card)
if not agent.holds_card(k) then return reply('lost') end
pool.begin_writes()
k.ag, k.sm = 'down', 0
lease.save(k)
redis.call('HSET', key('card', k.id), 'rs', 'its agent has left')
sweep.clear_head(k)
if sweep.unclaim(k) or sweep.lost_jobs(k, 'give_back') then return reply('ok', { more = 1 }) end
agent.drop_leases(k)
k.sid, k.ag = '', 'lost'
lease.save(k)
redis.call('ZREM', key('sessions'), 'c:' .. k.id)
redis.call('HINCRBY', META, 'stamp', 1)
return reply('ok', { more = 0 })
