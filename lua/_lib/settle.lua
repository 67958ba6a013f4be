-- settle: the end of a job for its callers, its result, its key, its record's remaining life.
local settle = { kept = {}, kept_bytes = 0, kept_number = 0, ended = { number = 0 } }

local INLINE_RESULT = 16384

local RECORD_SLACK_MS = 60000

-- What is stored for a while: answers under a key or asked for later, answers that were taken at once, inputs of dead
-- letters. One sorted set each by expiry, one sum for all. Over the budget letters go first, then whatever is oldest: were
-- it what expires first, a fresh answer would make room for what has lain there for an hour.
settle.KEPT_FOR = { results = RESULT_TTL_MS, delivered = DELIVERED_TTL_MS }
settle.KINDS = { 'letters', 'results', 'delivered' }

function settle.drop(kind, member)
  local at = string.find(member, ':', 1, true)
  local id, bytes = string.sub(member, 1, at - 1), num(string.sub(member, at + 1))
  if redis.call('ZREM', key(kind), member) == 0 then return end
  redis.call('HINCRBY', META, 'rb', int(-bytes))
  if kind == 'letters' then
    redis.call('DEL', key('pay', id))
  else
    redis.call('DEL', key('res', id))
    local j = job.load(id)
    if j then job.set(id, j, 'rx', 1) end
  end
end

function settle.oldest()
  local letter = redis.call('ZRANGE', key('letters'), 0, 0)[1]
  if letter then return 'letters', letter end
  local kind, member, stored_at
  for name, ttl_ms in pairs(settle.KEPT_FOR) do
    local head = redis.call('ZRANGE', key(name), 0, 0, 'WITHSCORES')
    local at = head[1] and num(head[2]) - ttl_ms
    if at and (not stored_at or at < stored_at) then kind, member, stored_at = name, head[1], at end
  end
  return kind, member
end

-- What one call stores is entered, and weighed against the budget, when the script replies.
function settle.keep(kind, id, bytes, ttl_ms)
  if settle.kept_number == 0 then at_end[#at_end + 1] = settle.write_kept end
  local list = settle.kept[kind] or {}
  local used = #list
  settle.kept[kind], list[used + 1], list[used + 2] = list, NOW + ttl_ms, id .. ':' .. int(bytes)
  settle.kept_bytes, settle.kept_number = settle.kept_bytes + bytes, settle.kept_number + 1
end

function settle.write_kept()
  for kind, list in pairs(settle.kept) do redis.call('ZADD', key(kind), unpack(list)) end
  local sum = redis.call('HINCRBY', META, 'rb', int(settle.kept_bytes))
  for _ = 1, MOVE_LIMIT * settle.kept_number do
    if sum <= RESULT_BUDGET then break end
    local kind, member = settle.oldest()
    if not kind then break end
    settle.drop(kind, member)
    sum = num(redis.call('HGET', META, 'rb'))
  end
  settle.kept, settle.kept_bytes, settle.kept_number = {}, 0, 0
end

-- Returns true when there are more.
function settle.expire_results()
  local more = false
  for _, kind in ipairs(settle.KINDS) do
    local due = redis.call('ZRANGEBYSCORE', key(kind), '-inf', int(NOW), 'LIMIT', 0, MOVE_LIMIT)
    for _, member in ipairs(due) do settle.drop(kind, member) end
    more = more or #due == MOVE_LIMIT
  end
  return more
end

-- Is the lease of this job's last run still on a card whose agent can report its end?
function settle.is_on_card(j)
  return j[L] ~= '' and lease.card(j[D]).sid ~= '' and lease.get(j[D], j[L]) ~= nil
end

function settle.key_record(id, j)
  local record = j[K] ~= '' and redis.call('GET', key('key', j[K]))
  return record and string.sub(record, 65) == id and record or nil
end

function settle.free_key(id, j)
  if settle.key_record(id, j) then redis.call('DEL', key('key', j[K])) end
end

-- A job that ends while it waits for the former run of its key leaves the key to that run: the next one must wait for it too.
function settle.hand_key_back(id, j)
  local record = settle.key_record(id, j)
  if record then redis.call('SET', key('key', j[K]), string.sub(record, 1, 64) .. j.bl, 'PX', int(KEY_TTL_MS)) end
  local former = job.load(j.bl)
  if former then job.set(j.bl, former, 'nx', nil) end
end

-- Settles the callers of a live job. extra: code details; result: inline bytes; stored: the key under which its agent stored them.
-- The caller has taken care of the lease. Returns false where the table has no such transition.
function settle.job(id, j, event, extra)
  local was_queued, was_settled = j[S] == 'queued', j[ST] > 0
  local row = job.set_state(id, j, event)
  if not row then return false end
  if was_settled then pool.count('settled_twice') end
  j[ST] = NOW
  if was_queued then job.dequeue(id, j) end
  limits.add(j, 0, -j[PB])
  if row.code ~= '' then
    job.set(id, j, 'co', row.code)
    job.set(id, j, 'er', string.sub(extra.detail or '', 1, 2000))
    if extra.field then job.set(id, j, 'fi', extra.field) end
    pool.count('code.' .. row.code)
  end
  if extra.retry_ms then job.set(id, j, 'ra', extra.retry_ms) end
  if extra.peak then j[PK], j[RT] = extra.peak, extra.run_ms end
  pool.count('settled.' .. row.to)

  local keyed = j[K] ~= ''
  local result_ttl = (keyed or j[SY] == 0) and RESULT_TTL_MS or DELIVERED_TTL_MS
  local record_ttl = result_ttl
  if keyed and row.pinned then record_ttl = KEY_TTL_MS end
  if row.to == 'failed' then record_ttl = math.max(record_ttl, DEAD_LETTER_TTL_MS) end
  if row.to == 'succeeded' then settle.store(id, j, extra, result_ttl) end
  -- A dead letter keeps its inputs, within the same budget, so that an operator can run it again.
  if row.to == 'failed' then
    redis.call('PEXPIRE', key('pay', id), int(record_ttl))
    settle.keep('letters', id, j[PB], record_ttl)
  end
  if keyed then settle.key(id, j, row) end
  j.ttl_ms = record_ttl + RECORD_SLACK_MS
  if j.more and job.watchers(j, true)[1] then redis.call('PEXPIRE', key('ev', id), int(result_ttl)) end
  settle.note_ended(id, j, row.to ~= 'failed', record_ttl)
  local is_small = extra.result and #extra.result <= INLINE_RESULT
  job.tell(id, j, false, job.pack(j), is_small and extra.result or nil)
  return true
end

-- Settled jobs change their places together, when the script replies.
function settle.note_ended(id, j, is_input_done, ttl_ms)
  local e = settle.ended
  local number = e.number
  if number == 0 then
    at_end.settled = settle.write_ended
    e.ids, e.expiry, e.inputs, e.gateways = {}, {}, {}, {}
  end
  e.number, e.ids[number + 1], e.expiry[2 * number + 1], e.expiry[2 * number + 2] = number + 1, id, NOW + ttl_ms, id
  if is_input_done then e.inputs[#e.inputs + 1] = key('pay', id) end
  if j[GW] ~= '' then
    local ids = e.gateways[j[GW]] or {}
    e.gateways[j[GW]], ids[#ids + 1] = ids, id
  end
end

function settle.write_ended()
  local e = settle.ended
  redis.call('ZREM', key('deadlines'), unpack(e.ids))
  redis.call('ZADD', key('expiry'), unpack(e.expiry))
  if e.inputs[1] then redis.call('DEL', unpack(e.inputs)) end
  for worker, ids in pairs(e.gateways) do redis.call('SREM', key('gwj', worker), unpack(ids)) end
  settle.ended = { number = 0 }
end

function settle.store(id, j, extra, ttl_ms)
  if extra.result then
    redis.call('SET', key('res', id), extra.result, 'PX', int(ttl_ms))
    j[RB] = #extra.result
  else
    redis.call('RENAME', extra.stored, key('res', id))
    redis.call('PEXPIRE', key('res', id), int(ttl_ms))
    j[RB] = redis.call('STRLEN', key('res', id))
  end
  settle.keep((j[K] ~= '' or j[SY] == 0) and 'results' or 'delivered', id, j[RB], ttl_ms)
end

function settle.key(id, j, row)
  if row.pinned then
    redis.call('PEXPIRE', key('key', j[K]), int(KEY_TTL_MS))
  elseif j.bl then
    settle.hand_key_back(id, j)
  elseif not settle.is_on_card(j) then
    settle.free_key(id, j)
  end
end

-- The run of a settled job has left its card: whoever waits under the same key may start now.
function settle.lease_ended(id, j)
  if job.is_live(j) then return end
  if j.nx then
    local next_id = j.nx
    job.set(id, j, 'nx', nil)
    local n = job.load(next_id)
    if n and n[S] == 'queued' and n.bl then
      job.unblock(next_id, n)
      return next_id, n
    end
  elseif j[K] ~= '' and j[S] ~= 'succeeded' and not transitions.PINNED[j.co or ''] then
    settle.free_key(id, j)
  end
end
