-- emit: progress and streamed output of a running job, for those who watch its events.
-- Guarantee: nobody but the holder of the current lease writes events of a job.
-- Fence: session and lease. KEYS: meta, card:<id>, job:<id>
-- ARGV: arguments {card, session, job, lease, attempt, types}, settings, '', one packed event after the other. Returns: ok | fenced
-- Cost: one XADD for each event, one for each worker that watches.
-- include: base arguments pool limits transitions rate lease job
local k = lease.card(A.card)
local record = k.sid == A.session and lease.get(A.card, A.lease)
local j = record and record.job == A.job and job.load(A.job)
if not j or j[L] ~= A.lease or not job.is_live(j) then return reply('fenced') end
pool.begin_writes()
local stream = key('ev', A.job)
for i, kind in ipairs(A.types) do
  redis.call('XADD', stream, 'MAXLEN', '~', 1024, '*', 'a', int(A.attempt), 't', kind, 'd', ARGV[3 + i])
end
redis.call('PEXPIRE', stream, int(j[TL] + 60000))
job.tell(A.job, j, true)
return reply('ok')
