-- claim: an agent asks for work.
-- Guarantee: the same sequence number gets the same answer; nothing is handed out twice.
-- Fence: session, sequence number. KEYS: meta, card:<id>
-- ARGV: arguments {card, session, seq, want, starts, sample}, settings, lease ids. Returns: ok {jobs, verdicts, more} + inputs | lost | stale_seq
-- Cost: at most 16 jobs handed out, at most 16 granted.
-- include: base arguments pool limits transitions rate lease job settle place agent sweep
-- at once: pool(begin_writes note_time) lease(card unpack_card load_all unpack get model numbers save write settle is_open
--   put write_card write_leases) job(load_all read unpack load is_live save write pack write_told) place(pump fill
--   heads queues fill_from ready) agent(holds_card repeated renew starts sample hand_out take hand answer inputs)
local k = lease.card(A.card)
if not agent.holds_card(k) then return reply('lost') end
local again = agent.repeated(k)
if again then return again end
pool.begin_writes()
agent.renew(k)
agent.starts(k, A.starts)
agent.sample(k, A.sample)
local more = place.pump(k.id)
return agent.hand_out(k, A.want, {}, more)
