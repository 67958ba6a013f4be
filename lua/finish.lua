-- finish: an agent reports what became of jobs; bytes return, callers are told, waiters are granted, the next jobs handed out.
-- Guarantee: only the holder of the current lease settles; a repeated number does nothing twice.
-- Fence: session, sequence number, lease id of each report. KEYS: meta, card:<id>
-- ARGV: arguments {card, session, seq, want, starts, sample, reports}, settings, lease ids, results ...
-- Returns: ok {jobs, verdicts, more} + inputs | lost | stale_seq
-- Cost: at most 16 reports, 16 grants, 16 hand-outs, 16 deadlines.
-- include: base arguments pool limits transitions rate lease job settle place agent sweep
local k = lease.card(A.card)
if not agent.holds_card(k) then return reply('lost') end
local again = agent.repeated(k)
if again then return again end
pool.begin_writes()
agent.renew(k)
agent.starts(k, A.starts)
agent.load_reported(k, A.reports)
local verdicts = {}
for i, report in ipairs(A.reports) do verdicts[i] = agent.report(k, report) end
agent.sample(k, A.sample)
agent.place_back()
sweep.deadlines()
local more = place.pump(k.id)
return agent.hand_out(k, A.want, verdicts, more)
