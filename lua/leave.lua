-- leave: an agent has drained and ends. What it still held runs elsewhere; its card is known, without a session.
-- Guarantee: nothing counts as a crash or a loss; no lease of the session survives it.
-- Fence: session. KEYS: meta, card:<id>. ARGV: arguments {card, session}, settings, lease ids. Returns: ok {more} | lost
-- Cost: the leases of the card, at most 16 jobs moved; called again while more is 1.
-- include: base transitions rate lease job settle place agent sweep
local k = lease.card(A.card)
if not agent.holds_card(k) then return reply('lost') end
begin_writes()
k.ag, k.sm = 'down', 0
redis.call('HSET', key('card', k.id), 'ag', 'down', 'rs', 'its agent has left')
redis.call('HDEL', key('card', k.id), 'sm')
sweep.clear_head(k)
if sweep.unclaim(k) or sweep.lost_jobs(k, 'give_back') then return reply('ok', { more = 1 }) end
agent.drop_leases(k)
redis.call('HSET', key('card', k.id), 'sid', '', 'ag', 'lost')
redis.call('ZREM', key('sessions'), 'c:' .. k.id)
redis.call('HINCRBY', META, 'stamp', 1)
return reply('ok', { more = 0 })
