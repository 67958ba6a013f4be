-- audit: recomputes the sums of some cards from their leases; drift must be 0 and is counted.
-- Guarantee: afterwards each sum is that of the leases; a second call finds nothing.
-- Fence: none (recomputing is harmless).
-- KEYS: meta. ARGV: arguments {cards (ids, empty: all)}, settings. Returns: ok {drift {card -> bytes and jobs}}
-- Cost: the leases of the cards named.
-- include: base transitions rate lease
begin_writes()
local ids = A.cards
if #ids == 0 then ids = redis.call('ZRANGE', key('cards'), 0, -1) end
local drift = {}
for _, id in ipairs(ids) do drift[#drift + 1] = { id, lease.audit(id) } end
redis.call('HSET', META, 'audited', int(NOW))
return reply('ok', { drift = drift })
