-- list: one page of jobs, newest first.
-- Guarantee: nothing is changed.
-- Fence: none (the tenant filters).
-- KEYS: meta, jobs. ARGV: arguments {after_ms, after_id, limit, state, model, tenant}, settings. Returns: ok {jobs, next_ms, next_id} + records
-- Cost: at most 512 records looked at per call; a filter that finds little answers with a short page and a cursor.
-- include: base arguments pool limits transitions rate lease job view
local LOOK = 512
local start = 0
if A.after_id then
  local rank = redis.call('ZREVRANK', KEYS[2], A.after_id)
  start = rank and rank + 1 or redis.call('ZCOUNT', KEYS[2], '(' .. int(A.after_ms), '+inf')
end
local found, records, looked, last_id, last_ms = {}, {}, 0, nil, nil
while looked < LOOK and #found < A.limit do
  local part = redis.call('ZREVRANGE', KEYS[2], start + looked, start + looked + 31, 'WITHSCORES')
  if #part == 0 then
    last_id = nil
    break
  end
  local ids = {}
  for i = 1, #part, 2 do ids[#ids + 1] = part[i] end
  job.load_all(ids)
  for i = 1, #part, 2 do
    looked = looked + 1
    last_id, last_ms = part[i], num(part[i + 1])
    local j = job.load(part[i])
    if j and (not A.state or j[S] == A.state) and (not A.model or j[M] == A.model) and (not A.tenant or j[T] == A.tenant) then
      found[#found + 1] = view.job(part[i], j)
      records[#records + 1] = job.pack(j)
      if #found == A.limit then break end
    end
  end
end
return reply('ok', { jobs = found, next_id = last_id, next_ms = last_ms }, unpack(records))
