-- lease: the only code that moves bytes. A card's sums change in reserve() and release() and nowhere else but audit.
-- A lease is a field of leases:<card>; its random id is the fencing token. Record: doubles, then strings that end with a zero
-- byte: bytes, granted, handed (its sequence number, 0 = not handed), started, ending (0, 1 = end it, 2 = by force), job, model,
-- recall (the card that asks for it).
-- A card's numbers are one packed field `r` of card:<card>, the same in scheduler/records.py, held equal by a test.
local lease = { loaded = {}, unsaved = {} }

local RECORD = '<dddddsss'
local CARD = '<dddddddddddddddddddddddssssss'

-- hr headroom, sl slots, sm sample read, to total, dr driver, cx context, fo foreign, ov overrun, re resident, ex external,
-- li lingering, jb leased to jobs, nj jobs, fa factor, hj/hb the head for which bytes accumulate, xl the job that runs alone,
-- pk peak, sf floor for the time of samples, dq floor for the number of beats, us/ow/al/rv used, own, allocated, reserved of the
-- sample, sq last sequence number, sid session, op operator's state, ag agent's state, cl classes. Held for the rest of the script.
-- model: one of which it will be asked next.
function lease.card(id, model)
  local k = lease.loaded[id]
  if k then return k end
  local read
  if model then
    read = redis.call('HMGET', key('card', id), 'r', 'm:' .. model, 'n:' .. model, 'v:' .. model)
  else
    read = { redis.call('HGET', key('card', id), 'r') }
  end
  if read[1] then
    k = lease.unpack_card(read[1])
  else
    k = {
      hr = 0, sl = 0, sm = 0, to = 0, dr = 0, cx = 0, fo = 0, ov = 0, re = 0, ex = 0, li = 0, jb = 0, nj = 0, fa = 1000, hb = 0, pk = 0,
      sf = 0, dq = 0, us = 0, ow = 0, al = 0, rv = 0, sq = 0, sid = '', op = '', ag = '', hj = '', xl = '', cl = '',
    }
  end
  k.id, k.models, k.fresh, k.leases, k.moved = id, {}, {}, {}, {}
  if model then k.models[model] = lease.numbers(read[2], read[3], read[4]) end
  lease.loaded[id] = k
  return k
end

function lease.unpack_card(packed)
  local hr, sl, sm, to, dr, cx, fo, ov, re, ex, li, jb, nj, fa, hb, pk, sf, dq, us, ow, al, rv, sq, sid, op, ag, hj, xl, cl =
    struct.unpack(CARD, packed)
  return {
    hr = hr, sl = sl, sm = sm, to = to, dr = dr, cx = cx, fo = fo, ov = ov, re = re, ex = ex, li = li, jb = jb, nj = nj, fa = fa,
    hb = hb, pk = pk, sf = sf, dq = dq, us = us, ow = ow, al = al, rv = rv, sq = sq, sid = sid, op = op, ag = ag, hj = hj, xl = xl,
    cl = cl, id = '', models = false, fresh = false, leases = false, moved = false, ended = nil, answer = nil, is_unsaved = false,
  }
end

-- The card is written when the script replies.
function lease.save(k)
  if k.is_unsaved then return end
  local unsaved = lease.unsaved
  if not unsaved[1] then at_end[#at_end + 1] = lease.write end
  k.is_unsaved, unsaved[#unsaved + 1] = true, k
end

function lease.write()
  local unsaved = lease.unsaved
  lease.unsaved = {}
  for _, k in ipairs(unsaved) do lease.settle(k) end
end

function lease.write_card(k)
  local packed = struct.pack(CARD, k.hr, k.sl, k.sm, k.to, k.dr, k.cx, k.fo, k.ov, k.re, k.ex, k.li, k.jb, k.nj, k.fa, k.hb, k.pk,
    k.sf, k.dq, k.us, k.ow, k.al, k.rv, k.sq, k.sid, k.op, k.ag, k.hj, k.xl, k.cl)
  local flat = { 'r', packed, nil, nil, nil, nil }
  for name, m in pairs(k.models) do
    if m.moved then
      flat[#flat + 1], m.moved = 'n:' .. name, false
      flat[#flat + 1] = int(m.taken)
    end
  end
  if k.answer then
    flat[#flat + 1] = 'an'
    flat[#flat + 1], k.answer = k.answer, nil
  end
  redis.call('HSET', key('card', k.id), unpack(flat))
  lease.write_leases(k)
end

-- What is unwritten of a card, before its tables are read as a whole.
function lease.settle(k)
  if not k.is_unsaved then return end
  k.is_unsaved = false
  lease.write_card(k)
end

function lease.forget(k) k.is_unsaved, lease.loaded[k.id] = false, nil end

-- What the card hosts has changed: numbers read before are written, and read anew.
function lease.republished(k)
  lease.settle(k)
  k.models = {}
  lease.save(k)
end

-- Unknown or old memory admits nothing.
function lease.is_open(k)
  return k.op == 'ready' and k.ag == 'ready' and k.sid ~= '' and k.sm > 0 and NOW - k.sm <= 2 * BEAT_MS
end

-- What may be granted on a card; the sum stands in docs/architecture.md.
function lease.sum(k)
  local usable = k.to - k.dr - k.hr - k.cx
  local room = usable - k.re - k.ex - k.li - k.fo - k.ov
  local withheld = room - math.floor(room * k.fa / 1000)
  local free = room - withheld - k.jb
  local reserved = k.hj ~= '' and math.max(0, math.min(k.hb, free)) or 0
  return free - reserved, reserved, room, withheld, usable
end

-- How many jobs of a model the card takes at once (0: not ready here), how many it has, the version that it hosts.
function lease.model(k, name)
  local m = k.models[name]
  if not m then
    local read = redis.call('HMGET', key('card', k.id), 'm:' .. name, 'n:' .. name, 'v:' .. name)
    m = lease.numbers(read[1], read[2], read[3])
    k.models[name] = m
  end
  return m
end

function lease.numbers(slots, taken, version) return { slots = num(slots), taken = num(taken), version = version or '', moved = false } end

-- Why this job cannot be granted on this card now: nil, 'slots' or 'bytes'.
function lease.obstacle(k, job_id, j)
  local m = lease.model(k, j[M])
  if k.nj >= k.sl or m.taken >= m.slots or k.xl ~= '' then return 'slots' end
  local grantable, reserved = lease.sum(k)
  if j[N] > grantable + (k.hj == job_id and reserved or 0) then return 'bytes' end
  if j.al and k.nj > 0 then return 'bytes' end
  return nil
end

function lease.unpack(packed)
  local bytes, granted, handed, started, ending, job, model, recall = struct.unpack(RECORD, packed)
  return {
    bytes = bytes, granted = granted, handed = handed, started = started, ending = ending, job = job, model = model, recall = recall,
  }
end

-- The lease as this script left it; nil when there is none.
function lease.get(card, id)
  local k = lease.card(card)
  if k.leases[id] == nil then lease.load_all(k, { id }) end
  return k.leases[id] or nil
end

function lease.load_all(k, ids)
  local leases, missing = k.leases, {}
  for i = 1, #ids do
    if leases[ids[i]] == nil then missing[#missing + 1] = ids[i] end
  end
  if not missing[1] then return end
  local packed = redis.call('HMGET', key('leases', k.id), unpack(missing))
  for i, id in ipairs(missing) do leases[id] = packed[i] and lease.unpack(packed[i]) end
end

-- Every lease of a card: id, record, id, record ...
function lease.all(k)
  lease.settle(k)
  local all = redis.call('HGETALL', key('leases', k.id))
  for i = 1, #all, 2 do
    local record = k.leases[all[i]] or lease.unpack(all[i + 1])
    k.leases[all[i]], all[i + 1] = record, record
  end
  return all
end

-- Writes a lease with its card.
function lease.put(k, id, record)
  k.leases[id], k.moved[id] = record, record
  lease.save(k)
end

function lease.write_leases(k)
  local flat = {}
  for id, record in pairs(k.moved) do
    if k.leases[id] == record then
      flat[#flat + 1] = id
      flat[#flat + 1] = struct.pack(RECORD, record.bytes, record.granted, record.handed, record.started, record.ending, record.job,
        record.model, record.recall)
    end
  end
  if flat[1] then redis.call('HSET', key('leases', k.id), unpack(flat)) end
  k.moved = {}
  if k.ended then
    redis.call('HDEL', key('leases', k.id), unpack(k.ended))
    k.ended = nil
  end
end

function lease.clear_head(k)
  k.hj, k.hb = '', 0
  lease.save(k)
end

function lease.set_head(k, job_id, bytes)
  k.hj, k.hb = job_id, bytes
  lease.save(k)
end

function lease.move(k, name, bytes, jobs)
  local m = lease.model(k, name)
  k.jb, k.nj, m.taken, m.moved = k.jb + bytes, k.nj + jobs, m.taken + jobs, true
  lease.save(k)
end

-- Takes the bytes of a job on a card. The caller has checked obstacle(); an exclusive job takes all that there is.
function lease.reserve(k, id, job_id, j)
  local bytes = j[N]
  if k.hj == job_id then lease.clear_head(k) end
  if j.al then
    bytes = math.max(bytes, (lease.sum(k)))
    k.xl = job_id
  end
  lease.put(k, id, {
    bytes = bytes, granted = NOW, handed = 0, started = 0, ending = 0, job = job_id, model = j[M], recall = '',
  })
  lease.move(k, j[M], bytes, 1)
  k.pk = math.max(k.pk, k.jb + k.re)
  pool.count('granted')
  return bytes
end

-- Gives the bytes of a lease back, once: a lease that is not in the table any more moves nothing.
function lease.release(k, id, record)
  if k.leases[id] ~= record then return false end
  k.leases[id] = false
  local ended = k.ended or {}
  k.ended, ended[#ended + 1] = ended, id
  lease.move(k, record.model, -record.bytes, -1)
  if k.xl ~= '' and k.xl == record.job then k.xl = '' end
  return true
end

-- Recomputes a card's sums from its leases. Returns the drift in bytes and jobs that was found and mended.
function lease.audit(id)
  local k = lease.card(id)
  local bytes, jobs, by_model, has_exclusive = 0, 0, {}, false
  local all = lease.all(k)
  for i = 2, #all, 2 do
    local record = all[i]
    bytes, jobs = bytes + record.bytes, jobs + 1
    has_exclusive = has_exclusive or record.job == k.xl
    by_model[record.model] = (by_model[record.model] or 0) + 1
  end
  local drift = math.abs(bytes - k.jb) + math.abs(jobs - k.nj)
  for _, field in ipairs(redis.call('HKEYS', key('card', id))) do
    if string.sub(field, 1, 2) == 'n:' then
      local name = string.sub(field, 3)
      drift = drift + math.abs(num(redis.call('HGET', key('card', id), field)) - (by_model[name] or 0))
      if not by_model[name] then redis.call('HDEL', key('card', id), field) end
    end
  end
  if k.xl ~= '' and not has_exclusive then
    drift = drift + 1
    k.xl = ''
  end
  local head = k.hj ~= '' and job.load(k.hj)
  if k.hj ~= '' and not (head and head.rv == id) then
    drift = drift + 1
    lease.clear_head(k)
  end
  k.jb, k.nj, k.models = bytes, jobs, {}
  for name, number in pairs(by_model) do redis.call('HSET', key('card', id), 'n:' .. name, int(number)) end
  lease.save(k)
  if drift ~= 0 then pool.count('drift', drift) end
  return drift
end
