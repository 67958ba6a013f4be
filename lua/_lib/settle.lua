-- settle: the end of a job for its callers, its result, its key, its record's remaining life.
local settle = {}

local INLINE_RESULT = 16384

-- Stored results of the pool: one sorted set by expiry, one sum; over the budget the oldest go first.
function settle.drop_result(member)
  local at = string.find(member, ':', 1, true)
  local id, bytes = string.sub(member, 1, at - 1), num(string.sub(member, at + 1))
  if redis.call('ZREM', key('results'), member) == 0 then return end
  redis.call('HINCRBY', META, 'rb', int(-bytes))
  redis.call('DEL', key('res', id), key('pay', id))
  if redis.call('EXISTS', key('job', id)) == 1 then redis.call('HSET', key('job', id), 'rx', '1') end
end

local function keep_result(id, bytes, ttl_ms)
  redis.call('ZADD', key('results'), int(NOW + ttl_ms), id .. ':' .. int(bytes))
  if redis.call('HINCRBY', META, 'rb', int(bytes)) > CFG.result_budget then
    local oldest = redis.call('ZRANGE', key('results'), 0, MOVE_LIMIT - 1)
    for _, member in ipairs(oldest) do
      if num(redis.call('HGET', META, 'rb')) <= CFG.result_budget then break end
      settle.drop_result(member)
    end
  end
end

-- What callers are told; also how a replay is rendered.
function settle.outcome(id, j)
  local ended = num(j.st)
  local total = ended - num(j.ct)
  local run = j.rt and num(j.rt) or (j.rs and ended - num(j.rs) or 0)
  return {
    id = id, state = j.s, model = j.m, version = j.ve or '', code = j.co or '', detail = j.er or '', card = j.d or '',
    wait_ms = math.max(0, total - run), run_ms = run, total_ms = total, leased = num(j.lb), peak = num(j.pk), attempts = num(j.a),
    tenant = j.t, retry_ms = num(j.ra), stored = (j.rb and not j.rx) and 1 or 0,
  }
end

function settle.free_key(id, j)
  if j.k and string.sub(redis.call('GET', j.k) or '', 65) == id then redis.call('DEL', j.k) end
end

-- Settles the callers of a live job. extra: code details; result: inline bytes, or nil with stored_bytes for one that lies in res:<id>.
-- The caller has taken care of the lease. Returns false where the table has no such transition.
function settle.job(id, j, event, extra)
  extra = extra or {}
  local was_queued = j.s == 'queued'
  local row = job.set_state(id, j, event)
  if not row then return false end
  if redis.call('HSETNX', key('job', id), 'st', int(NOW)) == 0 then count('settled_twice') end
  j.st = int(NOW)
  if was_queued then job.dequeue(id, j) end
  redis.call('ZREM', key('deadlines'), id)
  job.tally_bytes(j, -1)
  if row.code ~= '' then job.set(id, j, 'co', row.code, 'er', string.sub(extra.detail or '', 1, 2000)) end
  if extra.retry_ms then job.set(id, j, 'ra', int(extra.retry_ms)) end
  if extra.peak then job.set(id, j, 'pk', int(extra.peak), 'rt', int(extra.run_ms or 0)) end
  count('settled.' .. row.to)
  if row.code ~= '' then count('code.' .. row.code) end

  local keyed = j.k ~= nil
  local result_ttl = (keyed or j.sy ~= '1') and CFG.result_ttl_ms or CFG.delivered_ttl_ms
  local record_ttl = result_ttl
  if keyed and row.pinned then record_ttl = CFG.key_ttl_ms end
  if row.to == 'failed' then record_ttl = math.max(record_ttl, CFG.dead_letter_ttl_ms) end
  if row.to == 'succeeded' then
    local bytes = extra.result and #extra.result or extra.stored_bytes
    if extra.result then
      redis.call('SET', key('res', id), extra.result, 'PX', int(result_ttl))
    else
      redis.call('PEXPIRE', key('res', id), int(result_ttl))
    end
    job.set(id, j, 'rb', int(bytes))
    keep_result(id, bytes, result_ttl)
  end
  -- A dead letter keeps its inputs, within the same budget, so that an operator can run it again.
  if row.to == 'failed' then
    redis.call('PEXPIRE', key('pay', id), int(record_ttl))
    keep_result(id, num(j.pb), record_ttl)
  else
    redis.call('DEL', key('pay', id))
  end
  if keyed then
    if row.pinned then
      redis.call('PEXPIRE', j.k, CFG.key_ttl_ms)
    elseif not (j.l and redis.call('HEXISTS', key('leases', j.d), j.l) == 1) then
      settle.free_key(id, j)
    end
  end
  redis.call('ZADD', key('expiry'), int(NOW + record_ttl), id)
  redis.call('PEXPIRE', key('job', id), int(record_ttl + 60000))
  redis.call('PEXPIRE', key('ev', id), int(result_ttl))
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
    settle.free_key(id, j)
  end
end
