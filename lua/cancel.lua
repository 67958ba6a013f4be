-- cancel: a caller or an operator ends a job for all of its clients.
-- Guarantee: the callers are settled at once; a job on a card is signalled, its bytes return with the agent's report. A finished
-- job is left as it is, but force reaches a run that is still on its card.
-- Fence: the tenant (empty: operator). KEYS: meta, job:<id>. ARGV: arguments {id, tenant, force}, settings, lease ids
-- Returns: ok {} | unknown {}
-- Cost: one record; at most one pump of its card.
-- include: base arguments pool limits transitions rate lease job settle place agent
local j = job.load(A.id)
if not j or (A.tenant and j[T] ~= A.tenant) then return reply('unknown') end
pool.begin_writes()
if job.is_live(j) then
  agent.end_job(A.id, j, 'cancel', { detail = 'job ' .. A.id .. ': cancelled', force = A.force })
elseif A.force and j[L] ~= '' then
  local record = lease.get(j[D], j[L])
  if record then
    record.ending = 2
    lease.put(lease.card(j[D]), j[L], record)
    pool.wake(j[D])
  end
end
return reply('ok')
