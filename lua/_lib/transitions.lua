-- transitions: rendered from scheduler/transitions.py by `python -m scheduler.transitions`.
-- Do not edit.
local TRANSITIONS = {
  grant = { from = { queued = true }, to = 'leased', code = '', pinned = false, counts = '' },
  takeover = { from = { leased = true }, to = 'leased', code = '', pinned = false, counts = '' },
  start = { from = { leased = true }, to = 'running', code = '', pinned = false, counts = '' },
  give_back = { from = { leased = true, running = true }, to = 'queued', code = '', pinned = false, counts = '' },
  unheld = { from = { leased = true, running = true }, to = 'queued', code = '', pinned = false, counts = '' },
  killed = { from = { leased = true, running = true }, to = 'queued', code = '', pinned = false, counts = '' },
  unclaimed = { from = { leased = true }, to = 'queued', code = '', pinned = false, counts = '' },
  agent_lost = { from = { leased = true, running = true }, to = 'queued', code = '', pinned = false, counts = 'loss' },
  oom = { from = { leased = true, running = true }, to = 'queued', code = '', pinned = false, counts = '' },
  crash = { from = { leased = true, running = true }, to = 'queued', code = '', pinned = false, counts = 'crash' },
  succeed = { from = { leased = true, running = true }, to = 'succeeded', code = '', pinned = true, counts = '' },
  model_error = { from = { leased = true, running = true }, to = 'failed', code = 'model_error', pinned = true, counts = '' },
  rejected_by_model = { from = { leased = true, running = true }, to = 'failed', code = 'rejected_by_model', pinned = true, counts = '' },
  non_finite = { from = { leased = true, running = true }, to = 'failed', code = 'non_finite', pinned = true, counts = '' },
  output_too_large = { from = { leased = true, running = true }, to = 'failed', code = 'output_too_large', pinned = true, counts = '' },
  run_timeout = { from = { leased = true, running = true }, to = 'failed', code = 'run_timeout', pinned = true, counts = '' },
  oom_again = { from = { leased = true, running = true }, to = 'failed', code = 'oom', pinned = false, counts = '' },
  crashed_alone = { from = { leased = true, running = true }, to = 'failed', code = 'crashed', pinned = false, counts = '' },
  lost_for_good = { from = { queued = true, leased = true, running = true }, to = 'failed', code = 'lost', pinned = false, counts = '' },
  failed_inside = { from = { leased = true, running = true }, to = 'failed', code = 'internal', pinned = false, counts = '' },
  cancel = { from = { queued = true, leased = true, running = true }, to = 'cancelled', code = 'cancelled', pinned = false, counts = '' },
  wait_timeout = { from = { queued = true, leased = true }, to = 'expired', code = 'wait_timeout', pinned = false, counts = '' },
  no_ready_card = { from = { queued = true }, to = 'expired', code = 'no_ready_card', pinned = false, counts = '' },
  total_timeout = { from = { queued = true, leased = true, running = true }, to = 'expired', code = 'total_timeout', pinned = false, counts = '' },
}
local PINNED = { model_error = true, non_finite = true, output_too_large = true, rejected_by_model = true, run_timeout = true }
