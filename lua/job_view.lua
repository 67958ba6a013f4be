-- job_view: one job as anybody may see it, and who watches it.
-- Guarantee: nothing of the job is changed but who watches it.
-- Fence: the tenant (empty: operator). KEYS: meta, job:<id>
-- ARGV: arguments {id, tenant, watcher, worker, events, unwatch}, settings. Returns: ok {id, position, why, eta_ms, deadline} + record + result | unknown
-- Cost: one record, the cards of its class.
-- include: base arguments pool limits transitions rate lease job view
local j = job.load(A.id)
if not j or (A.tenant and j[T] ~= A.tenant) then return reply('unknown') end
if A.unwatch then
  pool.begin_writes()
  job.set(A.id, j, 'v:' .. A.unwatch, nil)
  job.set(A.id, j, 'e:' .. A.unwatch, nil)
end
if A.watcher and job.is_live(j) then
  pool.begin_writes()
  job.set(A.id, j, (A.events and 'e:' or 'v:') .. A.watcher, A.worker)
end
local result = A.result and not job.is_live(j) and redis.call('GET', key('res', A.id)) or ''
return reply('ok', view.job(A.id, j), job.pack(j), result)
