-- audit: recomputes the sums of cards from their leases, and begins a round that finds what a failed script left behind: a live
-- job without a deadline, a run without its lease, a waiter outside its queue, bytes that no job has. Drift must be 0 and is counted.
-- Guarantee: afterwards each sum is that of the leases; once `more` is 0 each live job is where its state says.
-- Fence: none (recomputing is harmless).
-- KEYS: meta. ARGV: arguments {cards (ids, empty: all), go_on (the next step of the round alone)}, settings, lease ids
-- Returns: ok {drift {card -> bytes and jobs}, mended {kind -> number}, more}
-- Cost: the leases of the cards; 64 records looked at, at most 16 jobs moved.
-- include: base arguments pool limits transitions rate lease job settle place agent sweep mend
pool.begin_writes()
local drift = {}
if not A.go_on then
  local ids = A.cards
  if #ids == 0 then ids = redis.call('ZRANGE', key('cards'), 0, -1) end
  for _, id in ipairs(ids) do drift[#drift + 1] = { id, mend.sums(id) } end
  redis.call('HSET', META, 'audited', int(NOW))
  mend.begin()
end
local more = mend.step()
return reply('ok', { drift = drift, mended = mend.found(), more = more and 1 or 0 })
