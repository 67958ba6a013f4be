-- heartbeat: an agent is alive, what its card's memory is, what it holds; what it should end or give back.
-- Guarantee: a job that was handed out at or before the applied number and is not held runs again, without a crash count; a late
-- beat cannot requeue what a newer answer handed out. A model whose version another living card publishes with another contract
-- is not taken; it is once nobody does any more and it is published again.
-- Fence: session. KEYS: meta, card:<id>
-- ARGV: arguments {card, session, state, reason, applied, held {lease -> job}, starts, sample, hosted?}, settings, lease ids
-- Returns: ok {cancels, recalls, disputed {model -> reason}, operator, has_work, more} | lost
-- Cost: the leases of the card; at most 16 requeued, 16 granted, 16 deadlines, one ended session.
-- include: base arguments pool limits transitions rate lease job settle place agent hosting sweep
local k = lease.card(A.card)
if not agent.holds_card(k) then return reply('lost') end
pool.begin_writes()
agent.renew(k)
hosting.note_seen(k)
local disputed = A.hosted and hosting.publish(k, A.hosted) or {}
agent.starts(k, A.starts)
local is_late = A.state == 'ready' and A.applied < k.dq
if not is_late and (k.ag ~= A.state or redis.call('HGET', key('card', k.id), 'rs') ~= (A.reason or '')) then
  if k.ag ~= 'ready' and A.state == 'ready' then rate.serving_begins(k) end
  k.ag = A.state
  lease.save(k)
  redis.call('HSET', key('card', k.id), 'rs', A.reason or '')
  redis.call('HINCRBY', META, 'stamp', 1)
end
agent.sample(k, A.sample)

local cancels, recalls, unheld, more, known = {}, {}, 0, false, {}
local all = lease.all(k)
for i = 1, #all, 2 do
  local id, record = all[i], all[i + 1]
  known[id] = true
  local handed, is_misplaced = record.handed, disputed[record.model]
  if (handed > 0 and handed <= A.applied and not A.held[id]) or (handed == 0 and is_misplaced) then
    if unheld == MOVE_LIMIT then
      more = true
    else
      unheld = unheld + 1
      lease.release(k, id, record)
      local job_id = record.job
      local j = job.load(job_id)
      if handed == 0 then redis.call('LREM', place.ready(k), 1, job_id) end
      if j and j[L] == id and job.is_live(j) then
        agent.requeue(job_id, j, handed == 0 and 'unclaimed' or 'unheld')
        place.requeued(job_id, j)
      elseif j and j[L] == id then
        local next_id, n = settle.lease_ended(job_id, j)
        if next_id then place.requeued(next_id, n) end
      end
    end
  elseif handed > 0 and record.ending > 0 then
    local j = job.load(record.job)
    cancels[#cancels + 1] = { job = record.job, lease = id, force = record.ending == 2 and 1 or 0, reason = j and j.co or 'gone' }
  elseif (is_misplaced or record.recall ~= '') and record.started == 0 then
    recalls[#recalls + 1] = record.job
  end
end

-- A lease that the ledger does not have (lost with its server, or fenced off) will never settle anything.
for id, job_id in pairs(A.held) do
  if not known[id] then cancels[#cancels + 1] = { job = job_id, lease = id, force = 0, reason = 'gone' } end
end

if k.ag ~= 'ready' or k.op ~= 'ready' then
  sweep.clear_head(k)
  more = sweep.unclaim(k) or more
end
more = place.pump(k.id) or more
more = sweep.deadlines() or more
more = sweep.sessions() or more
return reply('ok', {
  cancels = cancels, recalls = recalls, disputed = disputed, operator = k.op, more = more and 1 or 0,
  has_work = redis.call('EXISTS', place.ready(k)),
})
