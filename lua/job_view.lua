-- job_view: one job as anybody may see it, and who watches it.
-- Guarantee: nothing of the job is changed but who watches it.
-- Fence: the tenant (empty: operator). KEYS: meta, job:<id>
-- ARGV: arguments {id, tenant, watcher, worker, events, unwatch}, settings. Returns: ok {job, position, why, eta_ms, outcome?} + result | unknown
-- Cost: one record, the cards of its class.
-- include: base transitions rate lease job settle view
local j = job.load(A.id)
if not j or (A.tenant and j.t ~= A.tenant) then return reply('unknown') end
if A.unwatch then
  begin_writes()
  job.unset(A.id, j, 'v:' .. A.unwatch, 'e:' .. A.unwatch)
end
if A.watcher and job.is_live(j) then
  begin_writes()
  job.set(A.id, j, (A.events and 'e:' or 'v:') .. A.watcher, A.worker)
end
local told = view.job(A.id, j)
if not job.is_live(j) then
  told.outcome = settle.outcome(A.id, j)
  if A.result then return reply('ok', told, redis.call('GET', key('res', A.id)) or '') end
end
return reply('ok', told)
