-- settle: the end of a job for its callers, its result, its key, its record's remaining life.
local settle = {}

local INLINE_RESULT = 16384

local RECORD_SLACK_MS = 60000

-- What is stored for a while: answers under a key or asked for later, answers that were taken at once, inputs of dead
-- letters. One sorted set each by expiry, one sum for all. Over the budget letters go first, then whatever is oldest: were
-- it what expires first, a fresh answer would make room for what has lain there for an hour.
local KEPT_FOR = { results = CFG.result_ttl_ms, delivered = CFG.delivered_ttl_ms }
local KINDS = { 'letters', 'results', 'delivered' }

local function drop(kind, member)
  local at = string.find(member, ':', 1, true)
  local id, bytes = string.sub(member, 1, at - 1), num(string.sub(member, at + 1))
  if redis.call('ZREM', key(kind), member) == 0 then return end
  redis.call('HINCRBY', META, 'rb', int(-bytes))
  if kind == 'letters' then
    redis.call('DEL', key('pay', id))
  else
    redis.call('DEL', key('res', id))
    if redis.call('EXISTS', key('job', id)) == 1 then redis.call('HSET', key('job', id), 'rx', '1') end
  end
end

local function oldest()
  local letter = redis.call('ZRANGE', key('letters'), 0, 0)[1]
  if letter then return 'letters', letter end
  local kind, member, stored_at
  for name, ttl_ms in pairs(KEPT_FOR) do
    local head = redis.call('ZRANGE', key(name), 0, 0, 'WITHSCORES')
    local at = head[1] and num(head[2]) - ttl_ms
    if at and (not stored_at or at < stored_at) then kind, member, stored_at = name, head[1], at end
  end
  return kind, member
end

local function keep(kind, id, bytes, ttl_ms)
  redis.call('ZADD', key(kind), int(NOW + ttl_ms), id .. ':' .. int(bytes))
  local sum = redis.call('HINCRBY', META, 'rb', int(bytes))
  for _ = 1, MOVE_LIMIT do
    if sum <= CFG.result_budget then return end
    drop(oldest())
    sum = num(redis.call('HGET', META, 'rb'))
  end
end

-- Returns true when there are more.
function settle.expire_results()
  local more = false
  for _, kind in ipairs(KINDS) do
    local due = redis.call('ZRANGEBYSCORE', key(kind), '-inf', int(NOW), 'LIMIT', 0, MOVE_LIMIT)
    for _, member in ipairs(due) do drop(kind, member) end
    more = more or #due == MOVE_LIMIT
  end
  return more
end

-- What callers are told; also how a replay is rendered.
function settle.outcome(id, j)
  local ended = num(j.st)
  local total = ended - num(j.ct)
  local run = j.rt and num(j.rt) or (j.rs and ended - num(j.rs) or 0)
  return {
    id = id, state = j.s, model = j.m, version = j.ve or '', code = j.co or '', detail = j.er or '', card = j.d or '',
    wait_ms = math.max(0, total - run), run_ms = run, total_ms = total, leased = num(j.lb), peak = num(j.pk), attempts = num(j.a),
    retry_ms = num(j.ra),
  }
end

-- Is the lease of this job's last run still on a card whose agent can report its end?
function settle.is_on_card(j)
  return j.l ~= nil and lease.card(j.d).sid ~= '' and redis.call('HEXISTS', key('leases', j.d), j.l) == 1
end

local function key_record(id, j)
  local record = j.k and redis.call('GET', key('key', j.k))
  return record and string.sub(record, 65) == id and record or nil
end

local function free_key(id, j)
  if key_record(id, j) then redis.call('DEL', key('key', j.k)) end
end

-- A job that ends while it waits for the former run of its key leaves the key to that run: the next one must wait for it too.
local function hand_key_back(id, j)
  local record = key_record(id, j)
  if record then redis.call('SET', key('key', j.k), string.sub(record, 1, 64) .. j.bl, 'PX', int(CFG.key_ttl_ms)) end
  redis.call('HDEL', key('job', j.bl), 'nx')
end

-- Settles the callers of a live job. extra: code details; result: inline bytes; stored: the key under which its agent stored them.
-- The caller has taken care of the lease. Returns false where the table has no such transition.
function settle.job(id, j, event, extra)
  extra = extra or {}
  local was_queued = j.s == 'queued'
  local row = transition(event, j.s)
  if not row then return false end
  if redis.call('HSETNX', key('job', id), 'st', int(NOW)) == 0 then count('settled_twice') end
  j.st = int(NOW)
  local told_also = {}
  local function also(field, value)
    told_also[#told_also + 1] = field
    told_also[#told_also + 1] = value
  end
  if was_queued then job.dequeue(id, j) end
  redis.call('ZREM', key('deadlines'), id)
  job.tally_bytes(j, -1)
  if row.code ~= '' then
    also('co', row.code)
    also('er', string.sub(extra.detail or '', 1, 2000))
  end
  if extra.retry_ms then also('ra', int(extra.retry_ms)) end
  if extra.peak then
    also('pk', int(extra.peak))
    also('rt', int(extra.run_ms or 0))
  end
  count('settled.' .. row.to)
  if row.code ~= '' then count('code.' .. row.code) end

  local keyed = j.k ~= nil
  local result_ttl = (keyed or j.sy ~= '1') and CFG.result_ttl_ms or CFG.delivered_ttl_ms
  local record_ttl = result_ttl
  if keyed and row.pinned then record_ttl = CFG.key_ttl_ms end
  if row.to == 'failed' then record_ttl = math.max(record_ttl, CFG.dead_letter_ttl_ms) end
  if row.to == 'succeeded' then
    if extra.result then
      redis.call('SET', key('res', id), extra.result, 'PX', int(result_ttl))
    else
      redis.call('RENAME', extra.stored, key('res', id))
      redis.call('PEXPIRE', key('res', id), int(result_ttl))
    end
    local bytes = extra.result and #extra.result or redis.call('STRLEN', key('res', id))
    also('rb', int(bytes))
    keep((keyed or j.sy ~= '1') and 'results' or 'delivered', id, bytes, result_ttl)
  end
  -- A dead letter keeps its inputs, within the same budget, so that an operator can run it again.
  if row.to == 'failed' then
    redis.call('PEXPIRE', key('pay', id), int(record_ttl))
    keep('letters', id, num(j.pb), record_ttl)
  else
    redis.call('DEL', key('pay', id))
  end
  if keyed then
    if row.pinned then
      redis.call('PEXPIRE', key('key', j.k), int(CFG.key_ttl_ms))
    elseif j.bl then
      hand_key_back(id, j)
    elseif not settle.is_on_card(j) then
      free_key(id, j)
    end
  end
  job.set_state(id, j, event, unpack(told_also))
  redis.call('ZADD', key('expiry'), int(NOW + record_ttl), id)
  redis.call('PEXPIRE', key('job', id), int(record_ttl + RECORD_SLACK_MS))
  if #job.watchers(j, true) > 0 then redis.call('PEXPIRE', key('ev', id), int(result_ttl)) end
  if j.gw then redis.call('SREM', key('gwj', j.gw), id) end

  local told = settle.outcome(id, j)
  if extra.result and #extra.result <= INLINE_RESULT then
    job.tell(id, j, false, 'o', cmsgpack.pack(told), 'r', extra.result)
  else
    job.tell(id, j, false, 'o', cmsgpack.pack(told))
  end
  return true
end

-- The run of a settled job has left its card: whoever waits under the same key may start now.
function settle.lease_ended(id, j)
  if job.is_live(j) then return end
  if j.nx then
    local next_id = j.nx
    job.unset(id, j, 'nx')
    local n = job.load(next_id)
    if n and n.s == 'queued' and n.bl then
      job.unblock(next_id, n)
      return next_id, n
    end
  elseif j.k and j.s ~= 'succeeded' and not PINNED[j.co or ''] then
    free_key(id, j)
  end
end
