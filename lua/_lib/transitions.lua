-- transitions: rendered from scheduler/transitions.py by `python -m scheduler.transitions`.
-- Do not edit. event = 'from ...|to|code|pinned|counts'
local TRANSITIONS = {
  grant = ' queued |leased|||',
  takeover = ' leased |leased|||',
  start = ' leased |running|||',
  give_back = ' leased running |queued|||',
  unheld = ' leased running |queued|||',
  killed = ' leased running |queued|||',
  unclaimed = ' leased |queued|||',
  agent_lost = ' leased running |queued|||loss',
  oom = ' leased running |queued|||',
  crash = ' leased running |queued|||crash',
  succeed = ' leased running |succeeded||pinned|',
  model_error = ' leased running |failed|model_error|pinned|',
  rejected_by_model = ' leased running |failed|rejected_by_model|pinned|',
  non_finite = ' leased running |failed|non_finite|pinned|',
  output_too_large = ' leased running |failed|output_too_large|pinned|',
  run_timeout = ' leased running |failed|run_timeout|pinned|',
  oom_again = ' leased running |failed|oom||',
  crashed_alone = ' leased running |failed|crashed||',
  lost_for_good = ' queued leased running |failed|lost||',
  failed_inside = ' leased running |failed|internal||',
  cancel = ' queued leased running |cancelled|cancelled||',
  wait_timeout = ' queued leased |expired|wait_timeout||',
  no_ready_card = ' queued |expired|no_ready_card||',
  total_timeout = ' queued leased running |expired|total_timeout||',
}
local PINNED = { model_error = true, non_finite = true, output_too_large = true, rejected_by_model = true, run_timeout = true }

-- The row of an event in a state, nil where there is none.
local function transition(event, state)
  local from, to, code, pinned, counts =
    string.match(TRANSITIONS[event] or '', '^(.*)|(.*)|(.*)|(.*)|(.*)$')
  if not from or not string.find(from, ' ' .. state .. ' ', 1, true) then return nil end
  return { to = to, code = code, pinned = pinned ~= '', counts = counts }
end
