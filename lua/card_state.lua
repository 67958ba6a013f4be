-- card_state: an operator (or an agent that distrusts its card) makes a card ready, cordoned or draining.
-- Guarantee: nothing is granted on a card that is not ready; what it has not handed out goes elsewhere.
-- Fence: none (an operator's word).
-- KEYS: meta, card:<id>. ARGV: arguments {card, state, reason}, settings, lease ids. Returns: ok {more} | unknown
-- Cost: at most 16 jobs taken off the card, or 16 granted; called again while more is 1.
-- include: base arguments pool limits transitions rate lease job settle place agent sweep
if redis.call('EXISTS', KEYS[2]) == 0 then return reply('unknown') end
pool.begin_writes()
local k = lease.card(A.card)
k.op = A.state
lease.save(k)
redis.call('HSET', KEYS[2], 'or', A.reason or '')
redis.call('HINCRBY', META, 'stamp', 1)
local more = false
if A.state == 'ready' then
  more = place.pump(k.id)
else
  sweep.clear_head(k)
  more = sweep.unclaim(k)
end
pool.wake(k.id)
return reply('ok', { more = more and 1 or 0 })
