-- card_down: before an agent kills its child. The card grants nothing until a beat says ready with a fresh sample.
-- Guarantee: as finish; and no grant can fall between the release of these bytes and their return in the driver.
-- Fence: session, sequence number, lease ids. KEYS: meta, card:<id>
-- ARGV: arguments {card, session, seq, reason, starts, reports}, settings, lease ids, results ...
-- Returns: ok {jobs = {}, verdicts, more} | lost | stale_seq
-- Cost: at most 16 reports, 16 jobs taken off the card.
-- include: base arguments pool limits transitions rate lease job settle place agent sweep
local k = lease.card(A.card)
if not agent.holds_card(k) then return reply('lost') end
local again = agent.repeated(k)
if again then return again end
pool.begin_writes()
agent.renew(k)
k.ag, k.sm = 'down', 0
-- A beat that was on its way must not open the card again: neither its word nor its sample counts.
k.sf, k.dq = NOW, A.seq
lease.save(k)
redis.call('HSET', key('card', k.id), 'rs', A.reason)
sweep.clear_head(k)
agent.starts(k, A.starts)
agent.load_reported(k, A.reports)
local verdicts = {}
for i, report in ipairs(A.reports) do verdicts[i] = agent.report(k, report) end
agent.place_back()
local more = sweep.unclaim(k)
return agent.hand_out(k, 0, verdicts, more)
