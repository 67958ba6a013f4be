-- finish: an agent reports what became of jobs; bytes return, callers are told, waiters are granted, the next jobs handed out.
-- Guarantee: only the holder of the current lease settles; a repeated number does nothing twice.
-- Fence: session, sequence number, lease id of each report. KEYS: meta, card:<id>
-- ARGV: arguments {card, session, seq, want, starts, sample, reports}, settings, lease ids, results ...
-- Returns: ok {jobs, verdicts, more} + inputs | lost | stale_seq
-- Cost: at most 16 reports, 16 grants, 16 hand-outs, 16 deadlines.
-- include: base arguments pool limits transitions rate lease job settle place agent sweep
-- at once: pool(begin_writes note_time count write_counted take_lease_id) limits(add write of read) transitions(row grant)
--   rate(granted read faded write write_changed) lease(card unpack_card load_all unpack get release move model
--   numbers save write settle is_open obstacle sum reserve put write_card write_leases) job(load_all read unpack
--   load is_live set_state save write tell tell_worker pack ends_waiting leave_queue write_told) settle(job store keep
--   write_kept note_ended write_ended) place(pump fill heads queues fill_from fill_part grant take_from_queue ready)
--   agent(holds_card repeated renew starts load_reported report sample place_back hand_out take hand answer inputs)
--   sweep(deadlines)
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
