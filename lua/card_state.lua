-- card_state: an operator (or an agent that distrusts its card) makes a card ready, cordoned or draining.
-- Guarantee: nothing is granted on a card that is not ready; what it has not handed out goes elsewhere.
-- Fence: none (an operator's word).
-- KEYS: meta, card:<id>. ARGV: arguments {card, state, reason}, settings, lease ids. Returns: ok {more} | unknown
-- Cost: at most 16 jobs taken off the card, or 16 granted; called again while more is 1.
-- include: base transitions rate lease job settle place agent sweep
if redis.call('EXISTS', KEYS[2]) == 0 then return reply('unknown') end
begin_writes()
local k = lease.card(A.card)
k.op = A.state
redis.call('HSET', KEYS[2], 'op', A.state, 'or', A.reason or '')
redis.call('HINCRBY', META, 'stamp', 1)
local more = false
if A.state == 'ready' then
  more = place.pump(k.id)
else
  sweep.clear_head(k)
  more = sweep.unclaim(k)
end
wake(k.id)
return reply('ok', { more = more and 1 or 0 })
