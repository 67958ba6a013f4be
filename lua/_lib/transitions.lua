-- transitions: rendered from scheduler/transitions.py by `python -m scheduler.transitions`.
-- Do not edit.
local transitions = {}

transitions.grant = {
  from = 'queued', to = 'leased', code = '', pinned = false, counts = '',
}
transitions.takeover = {
  from = 'leased', to = 'leased', code = '', pinned = false, counts = '',
}
transitions.start = {
  from = 'leased', to = 'running', code = '', pinned = false, counts = '',
}
transitions.give_back = {
  from = 'leased running', to = 'queued', code = '', pinned = false, counts = '',
}
transitions.unheld = {
  from = 'leased running', to = 'queued', code = '', pinned = false, counts = '',
}
transitions.killed = {
  from = 'leased running', to = 'queued', code = '', pinned = false, counts = '',
}
transitions.unclaimed = {
  from = 'leased', to = 'queued', code = '', pinned = false, counts = '',
}
transitions.agent_lost = {
  from = 'leased running', to = 'queued', code = '', pinned = false, counts = 'loss',
}
transitions.oom = {
  from = 'leased running', to = 'queued', code = '', pinned = false, counts = '',
}
transitions.crash = {
  from = 'leased running', to = 'queued', code = '', pinned = false, counts = 'crash',
}
transitions.succeed = {
  from = 'leased running', to = 'succeeded', code = '', pinned = true, counts = '',
}
transitions.model_error = {
  from = 'leased running', to = 'failed', code = 'model_error', pinned = true, counts = '',
}
transitions.rejected_by_model = {
  from = 'leased running', to = 'failed', code = 'rejected_by_model', pinned = true, counts = '',
}
transitions.non_finite = {
  from = 'leased running', to = 'failed', code = 'non_finite', pinned = true, counts = '',
}
transitions.output_too_large = {
  from = 'leased running', to = 'failed', code = 'output_too_large', pinned = true, counts = '',
}
transitions.run_timeout = {
  from = 'leased running', to = 'failed', code = 'run_timeout', pinned = true, counts = '',
}
transitions.oom_again = {
  from = 'leased running', to = 'failed', code = 'oom', pinned = false, counts = '',
}
transitions.crashed_alone = {
  from = 'leased running', to = 'failed', code = 'crashed', pinned = false, counts = '',
}
transitions.lost_for_good = {
  from = 'queued leased running', to = 'failed', code = 'lost', pinned = false, counts = '',
}
transitions.failed_inside = {
  from = 'leased running', to = 'failed', code = 'internal', pinned = false, counts = '',
}
transitions.cancel = {
  from = 'queued leased running', to = 'cancelled', code = 'cancelled', pinned = false, counts = '',
}
transitions.wait_timeout = {
  from = 'queued leased', to = 'expired', code = 'wait_timeout', pinned = false, counts = '',
}
transitions.no_ready_card = {
  from = 'queued', to = 'expired', code = 'no_ready_card', pinned = false, counts = '',
}
transitions.total_timeout = {
  from = 'queued leased running', to = 'expired', code = 'total_timeout', pinned = false, counts = '',
}

transitions.PINNED = { model_error = true, non_finite = true, output_too_large = true, rejected_by_model = true, run_timeout = true }

-- The row of an event in a state, nil where there is none.
function transitions.row(event, state)
  local row = transitions[event]
  if row and string.find(row.from, state, 1, true) then return row end
  return nil
end
