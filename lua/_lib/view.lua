-- view: what people and programs are told of jobs; reads only.
local view = {}

-- Why a queued job waits.
function view.why(id, j, position)
  if j.bl then return 'previous_run' end
  local any, slots = false, false
  for _, card in ipairs(redis.call('SMEMBERS', key('on', j[C]))) do
    local k = lease.card(card)
    if lease.is_open(k) and lease.model(k, j[M]).slots > 0 then
      any = true
      if lease.obstacle(k, id, j) == 'slots' then slots = true end
    end
  end
  if not any then return 'no_ready_card' end
  if j.rv then return 'reserved' end
  if position > 1 then return 'behind' end
  return slots and 'slots' or 'card_full'
end

-- What a record does not say of itself.
function view.job(id, j)
  local told = { id = id, position = 0 }
  if j[S] == 'queued' then
    told.position = num(redis.call('ZRANK', key('q', j[C]), id) or -1) + 1
    told.why = view.why(id, j, told.position)
    local interval = rate.interval(j[C])
    if interval then told.eta_ms = math.floor(interval * math.max(told.position, 1)) end
  end
  if job.is_live(j) then told.deadline = job.deadline(j) end
  return told
end
