-- gateway_beat: a gateway worker is alive; a share of the pool's sweeping.
-- Guarantee: a worker that beats keeps its session; what is due is done, some at a time.
-- Fence: none. KEYS: meta, sessions. ARGV: arguments {worker}, settings, lease ids
-- Returns: ok {stamp, ready_cards, more, mended}
-- Cost: at most 16 of each kind moved; the pool's cards are read, and audited once a minute; while a round of the audit is on, 64
-- records are looked at.
-- include: base arguments pool limits transitions rate lease job settle place agent sweep mend
local AUDIT_MS = 60000

pool.begin_writes()
redis.call('ZADD', KEYS[2], int(NOW + SESSION_MS), 'g:' .. A.worker)
-- First: what the sweeps count is written when this call ends.
local cards = redis.call('ZRANGE', key('cards'), 0, -1)
if NOW - num(redis.call('HGET', META, 'audited')) > AUDIT_MS then
  redis.call('HSET', META, 'audited', int(NOW))
  for _, id in ipairs(cards) do mend.sums(id) end
  mend.begin()
end
mend.step()
local more = sweep.deadlines()
more = sweep.sessions() or more
more = sweep.expired() or more
sweep.unknown()
local ready = 0
for _, id in ipairs(cards) do
  local k = lease.card(id)
  -- Without a slot there is no model that is ready.
  if lease.is_open(k) and k.sl > 0 then ready = ready + 1 end
end
return reply('ok', {
  stamp = num(redis.call('HGET', META, 'stamp')), ready_cards = ready, more = more and 1 or 0, mended = mend.found(),
})
