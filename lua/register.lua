-- register: an agent takes a card, with a fresh measurement. What its former session left is requeued, its leases end here.
-- Guarantee: one live session per card; no lease survives that the new session does not hold; cards that live and host a version
-- agree on its contract (input schema, units, batch_units).
-- Fence: the session that holds the card, while it lives. KEYS: meta, card:<id>
-- ARGV: arguments {card, session, state, reason, host, name, index, product, pid, headroom, simulated, sample, hosted {models, slots, resident, packed}},
-- settings, lease ids
-- Returns: ok {more} | taken {left_ms}
-- Cost: at most 16 jobs moved; called again while more is 1.
-- include: base arguments pool limits transitions rate lease job settle place agent hosting sweep
-- First of all, so that a server that was frozen gives its grace before it is asked whose session has ended.
pool.begin_writes()
local k = lease.card(A.card)
if k.sid ~= '' and k.sid ~= A.session then
  local left = num(redis.call('ZSCORE', key('sessions'), 'c:' .. k.id)) - NOW
  if left > 0 then return reply('taken', { left_ms = left }) end
end
if k.sid ~= A.session then
  k.sid, k.ag, k.sm = '', 'lost', 0
  lease.save(k)
  redis.call('DEL', key('ready', k.id))
  sweep.clear_head(k)
  if sweep.lost_jobs(k) then return reply('ok', { more = 1 }) end
  -- The former session's work is off the card: the caller measured after it had ended it.
  agent.drop_leases(k)
  lease.audit(k.id)
  redis.call('HDEL', key('card', k.id), 'an')
  k.sq, k.dq, k.sf = 0, 0, 0
end

k.sid, k.op, k.ag, k.hr = A.session, k.op == '' and 'ready' or k.op, A.state, A.headroom
lease.save(k)
redis.call('HSET', key('card', k.id), 'rs', A.reason or '', 'host', A.host, 'nm', A.name, 'ix', int(A.index), 'pr', A.product,
  'pid', int(A.pid), 'si', int(A.simulated))
hosting.publish(k, A.hosted)
redis.call('HINCRBY', META, 'stamp', 1)
hosting.note_seen(k)
agent.renew(k)
agent.sample(k, A.sample)
place.pump(k.id)
return reply('ok', { more = 0 })
