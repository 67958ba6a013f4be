-- abandon: a client left, or a gateway gave up on a submit whose outcome it does not know.
-- Guarantee: a submit that this call overtakes is refused; one client counts once. Without a key the job ends at once; with a
-- key it keeps its place for the grace.
-- Fence: the client id. KEYS: meta, job:<id of the submit>, key:<...> (or tomb again), tomb:<id>
-- ARGV: arguments {client, job, keyed, unknown}, settings, lease ids. Returns: ok {found}
-- Cost: one record; at most one pump of its card.
-- include: base arguments pool limits transitions rate lease job settle place agent
pool.begin_writes()
local id = A.job
local j = id and job.load(id)
if not j and A.keyed then
  local record = redis.call('GET', KEYS[3])
  if record then
    id = string.sub(record, 65)
    j = job.load(id)
  end
end
-- Where the gateway does not know what became of its submit, a repetition of it may still be on its way.
if A.unknown or not j then redis.call('SET', KEYS[4], '1', 'PX', int(TOMBSTONE_TTL_MS)) end
if not j or not job.has_client(id, j, A.client) then return reply('ok', { found = 0 }) end
job.remove_client(id, j, A.client)
if not job.has_clients(j) and job.is_live(j) then
  if j[K] == '' then
    agent.end_job(id, j, 'cancel', { detail = 'job ' .. id .. ': its client left' })
    pool.count('client_left')
  else
    job.set(id, j, 'ab', NOW + ABANDON_GRACE_MS)
    job.schedule(id, j)
  end
end
return reply('ok', { found = 1 })
