-- lease: the only code that moves bytes. A card's sums change in reserve() and release() and nowhere else but audit.
-- A lease is a field of leases:<card>; its random id is the fencing token.
-- Record: {bytes, job, granted_ms, handed_seq (0 = not handed), started, ending (0, 1 = end it, 2 = by force), model, recalled_for}
local lease = { BYTES = 1, JOB = 2, GRANTED = 3, HANDED = 4, STARTED = 5, ENDING = 6, MODEL = 7, RECALL = 8 }

local CARD_FIELDS = {
  'sid', 'op', 'ag', 'hr', 'sl', 'sm', 'to', 'dr', 'cx', 'fo', 'ov', 're', 'ex', 'li', 'jb', 'nj', 'fa',
  'hj', 'hb', 'xl', 'cl', 'pk', 'sf', 'dq',
}

local cards_loaded = {}

-- What may be granted on a card: 3-memory-and-agent.md. Held in locals for the rest of the script.
function lease.card(id)
  local k = cards_loaded[id]
  if k then return k end
  local v = redis.call('HMGET', key('card', id), unpack(CARD_FIELDS))
  k = { id = id, models = {}, versions = {} }
  for i, name in ipairs(CARD_FIELDS) do k[name] = v[i] or '' end
  for _, name in ipairs({ 'hr', 'sl', 'sm', 'to', 'dr', 'cx', 'fo', 'ov', 're', 'ex', 'li', 'jb', 'nj', 'hb', 'pk', 'sf', 'dq' }) do
    k[name] = num(k[name])
  end
  k.fa = k.fa == '' and 1000 or num(k.fa)
  cards_loaded[id] = k
  return k
end

local moved = {}

local function write_sums(k)
  local flat = { 'jb', int(k.jb), 'nj', int(k.nj), 'pk', int(k.pk) }
  for name, m in pairs(k.models) do
    if m.moved then
      flat[#flat + 1] = 'n:' .. name
      flat[#flat + 1] = int(m.taken)
    end
  end
  redis.call('HSET', key('card', k.id), unpack(flat))
end

at_end[#at_end + 1] = function()
  for _, k in pairs(moved) do write_sums(k) end
end

local function forget_loaded(id)
  if moved[id] then write_sums(moved[id]) end
  moved[id], cards_loaded[id] = nil, nil
end

-- The version of a model that a card hosts.
function lease.version(k, name)
  k.versions[name] = k.versions[name] or redis.call('HGET', key('card', k.id), 'v:' .. name) or ''
  return k.versions[name]
end

-- Unknown or old memory admits nothing.
function lease.is_open(k)
  return k.op == 'ready' and k.ag == 'ready' and k.sid ~= '' and k.sm > 0 and NOW - k.sm <= 2 * CFG.beat_ms
end

function lease.sum(k)
  local s = {}
  s.usable = k.to - k.dr - k.hr - k.cx
  s.room = s.usable - k.re - k.ex - k.li - k.fo - k.ov
  s.withheld = s.room - math.floor(s.room * k.fa / 1000)
  local free = s.room - s.withheld - k.jb
  s.reserved = k.hj ~= '' and math.max(0, math.min(k.hb, free)) or 0
  s.grantable = free - s.reserved
  return s
end

-- What the card hosts has changed: numbers read before are written, and read anew.
function lease.republished(k)
  if moved[k.id] then write_sums(k) end
  k.models, k.versions = {}, {}
end

-- How many jobs of a model the card takes at once (0: not ready here) and how many it has.
function lease.model(k, name)
  local m = k.models[name]
  if not m then
    local v = redis.call('HMGET', key('card', k.id), 'm:' .. name, 'n:' .. name)
    m = { slots = num(v[1]), taken = num(v[2]) }
    k.models[name] = m
  end
  return m
end

-- Why this job cannot be granted on this card now: nil, 'slots' or 'bytes'.
function lease.obstacle(k, job_id, j)
  local m = lease.model(k, j.m)
  if k.nj >= k.sl or m.taken >= m.slots or k.xl ~= '' then return 'slots' end
  local s = lease.sum(k)
  local free = s.grantable + (k.hj == job_id and s.reserved or 0)
  if num(j.n) > free then return 'bytes' end
  if j.al and k.nj > 0 then return 'bytes' end
  return nil
end

function lease.get(card, id)
  local packed = redis.call('HGET', key('leases', card), id)
  return packed and cmsgpack.unpack(packed) or nil
end

function lease.put(card, id, record) redis.call('HSET', key('leases', card), id, cmsgpack.pack(record)) end

function lease.clear_head(k)
  k.hj, k.hb = '', 0
  redis.call('HDEL', key('card', k.id), 'hj', 'hb')
end

function lease.set_head(k, job_id, bytes)
  k.hj, k.hb = job_id, bytes
  redis.call('HSET', key('card', k.id), 'hj', job_id, 'hb', int(bytes))
end

-- Takes the bytes of a job on a card. The caller has checked obstacle(); an exclusive job takes all that there is.
function lease.reserve(k, id, job_id, j)
  local bytes = num(j.n)
  if k.hj == job_id then lease.clear_head(k) end
  if j.al then
    bytes = math.max(bytes, lease.sum(k).grantable)
    k.xl = job_id
    redis.call('HSET', key('card', k.id), 'xl', job_id)
  end
  lease.put(k.id, id, { bytes, job_id, NOW, 0, 0, 0, j.m, '' })
  local m = lease.model(k, j.m)
  k.jb, k.nj, m.taken, m.moved, moved[k.id] = k.jb + bytes, k.nj + 1, m.taken + 1, true, k
  k.pk = math.max(k.pk, k.jb + k.re)
  count('granted')
  return bytes
end

-- Gives the bytes of a lease back, once: a lease that is not in the table any more moves nothing.
function lease.release(k, id, record)
  if redis.call('HDEL', key('leases', k.id), id) == 0 then return false end
  local name = record[lease.MODEL]
  local m = lease.model(k, name)
  k.jb, k.nj, m.taken, m.moved, moved[k.id] = k.jb - record[lease.BYTES], k.nj - 1, m.taken - 1, true, k
  if k.xl ~= '' and k.xl == record[lease.JOB] then
    k.xl = ''
    redis.call('HDEL', key('card', k.id), 'xl')
  end
  return true
end

-- Recomputes a card's sums from its leases. Returns the drift in bytes and jobs that was found and mended.
function lease.audit(id)
  forget_loaded(id)
  local k = lease.card(id)
  local bytes, jobs, by_model, has_exclusive = 0, 0, {}, false
  local all = redis.call('HVALS', key('leases', id))
  for _, packed in ipairs(all) do
    local record = cmsgpack.unpack(packed)
    bytes, jobs = bytes + record[lease.BYTES], jobs + 1
    has_exclusive = has_exclusive or record[lease.JOB] == k.xl
    by_model[record[lease.MODEL]] = (by_model[record[lease.MODEL]] or 0) + 1
  end
  local drift = math.abs(bytes - k.jb) + math.abs(jobs - k.nj)
  local fields = redis.call('HKEYS', key('card', id))
  for _, field in ipairs(fields) do
    if string.sub(field, 1, 2) == 'n:' then
      local name = string.sub(field, 3)
      drift = drift + math.abs(num(redis.call('HGET', key('card', id), field)) - (by_model[name] or 0))
      if not by_model[name] then redis.call('HDEL', key('card', id), field) end
    end
  end
  if k.xl ~= '' and not has_exclusive then
    drift = drift + 1
    redis.call('HDEL', key('card', id), 'xl')
  end
  if k.hj ~= '' and redis.call('HGET', key('job', k.hj), 'rv') ~= id then
    drift = drift + 1
    lease.clear_head(k)
  end
  redis.call('HSET', key('card', id), 'jb', int(bytes), 'nj', int(jobs))
  for name, number in pairs(by_model) do redis.call('HSET', key('card', id), 'n:' .. name, int(number)) end
  if drift ~= 0 then count('drift', drift) end
  forget_loaded(id)
  return drift
end
