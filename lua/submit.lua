-- submit: a gateway admits one job, joins the one that lives under the same key, or replays its outcome.
-- Guarantee: one round trip; at most one live job per key; no grant above a card's grantable bytes; bounded queue.
-- Fence: none (the job id is fresh; a tombstone left by `abandon` under it wins). Repeated with the same id it answers the same.
-- KEYS: meta, job:<id>, key:<tenant>:<digest> (or tomb:<id> again when there is no key), tomb:<id>
-- ARGV: arguments, settings, lease ids, inputs
-- Returns: status, map. ok {how, job, state, position, card, outcome}; refused {code, ...}
-- Cost: about 25 commands without waiters; with waiters one pump of the cards that fit.
-- include: base transitions rate lease job settle place
local ID, INPUTS = A.id, ARGV[4]
local KEY = A.fp and KEYS[3] or nil

local function refused(code, fields)
  fields = fields or {}
  fields.code = code
  count('refused.' .. code)
  return reply('refused', fields)
end

local function stored(how, id, j)
  local position = 0
  if j.s == 'queued' then position = num(redis.call('ZRANK', key('q', j.c), id) or -1) + 1 end
  return reply('ok', { how = how, job = id, state = j.s, position = position, card = j.d or '' })
end

-- A retry of this very call whose answer was lost.
if redis.call('EXISTS', KEYS[2]) == 1 then return stored('stored', ID, job.load(ID)) end
if redis.call('EXISTS', KEYS[4]) == 1 then return refused('cancelled') end

note_time()

local previous
if KEY then
  local record = redis.call('GET', KEY)
  if record then
    local fingerprint, id = string.sub(record, 1, 64), string.sub(record, 65)
    if fingerprint ~= A.fp then return refused('key_reused', { job = id }) end
    local j = job.load(id)
    if j and job.is_live(j) then
      if redis.call('HSETNX', key('job', id), 'c:' .. ID, A.async and '' or A.worker) == 1 then job.set(id, j, 'nc', int(num(j.nc) + 1)) end
      if A.events then job.set(id, j, 'e:' .. ID, A.worker) end
      if j.ab then
        job.unset(id, j, 'ab')
        job.schedule(id, j)
      end
      count('joined')
      return stored('joined', id, j)
    end
    if j and (j.s == 'succeeded' or PINNED[j.co or '']) then
      if j.s == 'succeeded' and (j.rx or redis.call('EXISTS', key('res', id)) == 0) then
        return refused('result_expired', { job = id })
      end
      count('replayed')
      local result = redis.call('GET', key('res', id))
      return reply('ok', { how = 'replayed', job = id, state = j.s, position = 0, card = j.d or '', outcome = settle.outcome(id, j) }, result or '')
    end
    if j and settle.is_on_card(j) then previous = id end
    if not j then count('key_without_job') end
  end
end

-- Models and limits.
local name, version = string.match(A.model, '^([^@]+)@(.+)$')
name = name or A.model
if not redis.call('ZSCORE', key('models'), name) or (version and redis.call('HEXISTS', key('model', name), version) == 0) then
  return refused('unknown_model')
end
local biggest, measured = 0, 0
local hosts = redis.call('SMEMBERS', key('on', A.model))
for _, card in ipairs(hosts) do
  local k = lease.card(card)
  if k.to > 0 then
    measured = measured + 1
    biggest = math.max(biggest, k.to - k.dr - k.hr - k.cx - k.re)
  end
end
if measured == #hosts and measured > 0 and A.bytes > biggest then return refused('exceeds_every_card', { largest = biggest }) end

local limits = redis.call('HMGET', key('limits'), 'w', 'wm:' .. name, 'wt:' .. A.tenant, 'b', 'bm:' .. name, 'bt:' .. A.tenant)
local function over(i, limit, more) return num(limits[i]) + more > limit end
local candidate = { m = name, c = A.model, n = A.bytes }
local fitting = previous and {} or place.candidates(ID, candidate)
local free = place.without_waiters(fitting)
-- A job that a card takes at once does not wait: those of other models who fill the queue do not keep it out.
local full
if not free and (over(1, CFG.queue_jobs, 1) or over(2, CFG.model_jobs, 1)) then
  full = 'queue_full'
elseif over(4, CFG.queue_bytes, #INPUTS) or over(5, CFG.model_bytes, #INPUTS) then
  full = 'queue_full'
elseif (not free and over(3, CFG.tenant_jobs, 1)) or over(6, CFG.tenant_bytes, #INPUTS) then
  full = 'quota_exceeded'
end
if full then
  local waiting = redis.call('ZCARD', key('q', A.model))
  return refused(full, { retry_ms = rate.promise(A.model, waiting), waiting = waiting })
end

-- A score of its own for each submit of one millisecond, so that the order of arrival is the order of the queue.
local last_ms, last_part = unpack(redis.call('HMGET', META, 'em', 'ep'))
local part = num(last_ms) == NOW and math.min(num(last_part) + 1, 4095) or 0
redis.call('HSET', META, 'em', int(NOW), 'ep', int(part))
local score = string.format('%.4f', NOW - A.priority * CFG.boost_ms + part / 4096)

local j = {
  m = name, c = A.model, s = 'queued', n = int(A.bytes), u = string.format('%.17g', A.units), p = int(A.priority), t = A.tenant,
  pb = int(#INPUTS), ct = int(NOW), ws = int(NOW), wl = int(A.wait_ms), rl = int(A.run_ms), tl = int(A.total_ms), sc = score,
  sy = A.async and '0' or '1', nc = '1', ['c:' .. ID] = A.async and '' or A.worker, k = KEY and string.sub(KEY, #PREFIX + 5), rq = A.request_id,
}
if A.events then j['e:' .. ID] = A.worker end
if not A.async and not KEY then j.gw = A.worker end
if previous then j.bl = previous end
local flat = {}
for field, value in pairs(j) do
  flat[#flat + 1] = field
  flat[#flat + 1] = value
end
redis.call('SET', key('pay', ID), INPUTS)
redis.call('HSET', KEYS[2], unpack(flat))
redis.call('ZADD', key('jobs'), int(NOW), ID)
job.schedule(ID, j)
job.tally_bytes(j, 1)
if j.gw then redis.call('SADD', key('gwj', j.gw), ID) end
-- The key outlives the job; when the job settles its time starts anew.
if KEY then redis.call('SET', KEY, A.fp .. ID, 'PX', int(CFG.key_ttl_ms + A.total_ms)) end
count('submitted')
if previous then
  redis.call('HSET', key('job', previous), 'nx', ID)
  job.enqueue(ID, j)
else
  place.submitted(ID, j, fitting, free)
end
return stored('stored', ID, free and j or job.load(ID))
