-- submit: a gateway admits one job, joins the one that lives under the same key, or replays its outcome.
-- Guarantee: one round trip; at most one live job per key; no grant above a card's grantable bytes; bounded queue.
-- Fence: none (the job id is fresh; a tombstone left by `abandon` under it wins). Repeated with the same id it answers the same.
-- KEYS: meta, job:<id>, key:<tenant>:<digest> (or tomb:<id> again when there is no key), tomb:<id>
-- ARGV: arguments (scheduler/records.py: the client's part of the record, then {wants events, worker, fingerprint}), settings, lease ids, inputs
-- Returns: ok {how, job, state, position, card} + record and result of a replay | refused {code, ...}
-- Cost: 16 commands into a queue, six more where it is granted at once; with waiters one pump of the cards that fit.
-- include: base pool limits transitions rate lease job settle place
-- at once: pool(note_time count write_counted) limits(of read add write) lease(card unpack_card is_open model numbers
--   obstacle) job(new unpack save write schedule deadline enqueue stand is_live pack write_told) place(candidates
--   without_waiters submitted)
local CLIENTS = '<ddddddddssssss'
local ID, INPUTS = string.sub(KEYS[2], #PREFIX + 5), ARGV[4]
local bytes, _, priority, _, _, _, total_ms, is_sync, name, class, tenant, digest, _, _, rest = struct.unpack(CLIENTS, ARGV[1])
local worker, wants_events, fingerprint = struct.unpack('<sds', ARGV[1], rest)
local KEY = digest ~= '' and KEYS[3] or nil

local function refused(code, fields)
  fields = fields or {}
  fields.code = code
  pool.count('refused.' .. code)
  return reply('refused', fields)
end

local function stored(how, id, j)
  local position = 0
  if j[S] == 'queued' then position = (redis.call('ZRANK', key('q', j[C]), id) or -1) + 1 end
  return reply('ok', { how = how, job = id, state = j[S], position = position, card = j[D] })
end

if redis.call('EXISTS', KEYS[2], KEYS[4]) > 0 then
  -- A retry of this very call whose answer was lost, or one that was given up.
  local j = job.load(ID)
  if j then return stored('stored', ID, j) end
  return refused('cancelled')
end

-- A score of its own for each submit of one millisecond, so that the order of arrival is the order of the queue.
ENTERED_PART = ENTERED == NOW and math.min(ENTERED_PART + 1, 4095) or 0
ENTERED = NOW
pool.note_time()

local previous
if KEY then
  local record = redis.call('GET', KEY)
  if record then
    local known, id = string.sub(record, 1, 64), string.sub(record, 65)
    if known ~= fingerprint then return refused('key_reused', { job = id }) end
    local j = job.load(id)
    if j and job.is_live(j) then
      if not job.has_client(id, j, ID) then job.set(id, j, 'c:' .. ID, is_sync == 1 and worker or '') end
      if wants_events == 1 then job.set(id, j, 'e:' .. ID, worker) end
      if j.ab then
        job.set(id, j, 'ab', nil)
        job.schedule(id, j)
      end
      pool.count('joined')
      return stored('joined', id, j)
    end
    if j and (j[S] == 'succeeded' or transitions.PINNED[j.co or '']) then
      if j[S] == 'succeeded' and (j.rx or redis.call('EXISTS', key('res', id)) == 0) then
        return refused('result_expired', { job = id })
      end
      pool.count('replayed')
      local result = redis.call('GET', key('res', id)) or ''
      return reply('ok', { how = 'replayed', job = id, state = j[S], position = 0, card = j[D] }, job.pack(j), result)
    end
    if j and settle.is_on_card(j) then previous = id end
    if not j then pool.count('key_without_job') end
  end
end

-- Models and limits.
local hosts = redis.call('SMEMBERS', key('on', class))
if #hosts == 0 then
  -- What a card has is known; so is what a card had a while ago.
  local version = #class > #name and string.sub(class, #name + 2)
  if not redis.call('ZSCORE', key('models'), name) or (version and redis.call('HEXISTS', key('model', name), version) == 0) then
    return refused('unknown_model')
  end
end
local biggest, measured = 0, 0
for _, card in ipairs(hosts) do
  local k = lease.card(card, name)
  if k.to > 0 then
    measured = measured + 1
    biggest = math.max(biggest, k.to - k.dr - k.hr - k.cx - k.re)
  end
end
if measured == #hosts and measured > 0 and bytes > biggest then return refused('exceeds_every_card', { largest = biggest }) end

local all, model, own = limits.of(name, tenant)
local fitting = previous and {} or place.candidates(hosts, ID, { [M] = name, [N] = bytes })
local free = place.without_waiters(fitting)
-- A job that a card takes at once does not wait: those of other models who fill the queue do not keep it out.
local full
if not free and (all.waiting >= QUEUE_JOBS or model.waiting >= MODEL_JOBS) then
  full = 'queue_full'
elseif all.bytes + #INPUTS > QUEUE_BYTES or model.bytes + #INPUTS > MODEL_BYTES then
  full = 'queue_full'
elseif (not free and own.waiting >= TENANT_JOBS) or own.bytes + #INPUTS > TENANT_BYTES then
  full = 'quota_exceeded'
end
if full then
  local waiting = redis.call('ZCARD', key('q', class))
  return refused(full, { retry_ms = rate.promise(class, waiting), waiting = waiting })
end

local j = job.new(ID, string.sub(ARGV[1], 1, rest - 1), NOW - priority * BOOST_MS + ENTERED_PART / 4096, is_sync == 1 and worker or '')
if is_sync == 0 then job.set(ID, j, 'c:' .. ID, '') end
if wants_events == 1 then job.set(ID, j, 'e:' .. ID, worker) end
if previous then job.set(ID, j, 'bl', previous) end
job.beside = { key('pay', ID), INPUTS }
redis.call('ZADD', key('jobs'), int(NOW), ID)
job.schedule(ID, j)
limits.add(j, 0, #INPUTS)
if j[GW] ~= '' then redis.call('SADD', key('gwj', j[GW]), ID) end
-- The key outlives the job; when the job settles its time starts anew.
if KEY then redis.call('SET', KEY, fingerprint .. ID, 'PX', int(KEY_TTL_MS + total_ms)) end
pool.count('submitted')
if previous then
  job.set(previous, job.load(previous), 'nx', ID)
  job.enqueue(ID, j)
else
  place.submitted(ID, j, fitting, free)
end
return stored('stored', ID, j)
