-- job: the record of a job, its state, its deadlines and its place in the queue.
-- One string: doubles, then strings that end with a zero byte, then a msgpack map of what few jobs have. The same in
-- scheduler/records.py, held equal by tests/ledger/test_records.py.
-- Fixed by submit:
--   n bytes, u units, p priority, pb payload bytes, wl/rl/tl the three limits, sy 1 = synchronous
--   m model (without version), c class, t tenant, k digest of its key, gw its gateway worker, rq request id
--   ct created, sc score
-- Moving (0, -1 for rt, or '' where there is none):
--   ws wait started, at attempt, gr granted, rs run started, lb leased bytes, st settled, pk peak bytes, rt run ms, rb result bytes
--   s state, d card, l lease, ve version that ran it, w worker of the client that submitted it and waits
-- More, where it is so:
--   np times passed, rv card that is reserved for it, cr crashes, ls losses, oo OOM seen, al alone, ab abandoned until
--   bl waits for the end of its key's former run, nx the job that waits for this one's end
--   co code, er detail, fi field of the inputs at fault, ra when to come back (ms), rx result no longer stored
--   c:<client> = worker ('' for none), v:<client> = worker that watches, e:<client> = worker that watches events
local job = { loaded = {}, unsaved = {}, told = {}, beside = {} }

-- Places in a record as scripts hold it; what few jobs have is there by its name.
local N, U, P, PB, WL, RL, TL, SY, M, C, T, K, GW, RQ, CT, SC = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16
local WS, AT, GR, RS, LB, ST, PK, RT, RB, S, D, L, VE, W = 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30
local FIELDS = 30
local JOB, BEGUN = '<ddddddddssssssdddddddddddsssss', '<dddddddddddsssss'
local STREAM_TTL_MS = 120000
local STREAM_ENTRIES, ENTRY_BYTES = 1024, 65536
local COLON, EVENTS = 58, 101

function job.load(id)
  local j = job.loaded[id]
  if j then return j end
  return job.read(id, redis.pcall('GET', key('job', id)))
end

-- A record that cannot be read is none: one such would else stop every call that comes to it, and with them its card or pool.
function job.read(id, packed)
  if type(packed) ~= 'string' then return nil end
  local is_read, j = pcall(job.unpack, id, packed)
  return is_read and j or nil
end

-- Several records by one command, in the same order, false for those that are gone.
function job.load_all(ids)
  local names, missing, found, loaded = {}, 0, {}, job.loaded
  for i = 1, #ids do
    local j = loaded[ids[i]]
    if not j then
      missing = missing + 1
      names[missing] = key('job', ids[i])
    end
    found[i] = j or false
  end
  if missing == 0 then return found end
  local packed, at = redis.call('MGET', unpack(names)), 0
  for i = 1, #ids do
    if not found[i] then
      at = at + 1
      found[i] = job.read(ids[i], packed[at]) or false
    end
  end
  return found
end

function job.unpack(id, packed)
  local j = { id = id, packed = packed, more = nil, ttl_ms = nil, struct.unpack(JOB, packed) }
  local at = j[FIELDS + 1]
  if at <= #packed then
    j.more = cmsgpack.unpack(string.sub(packed, at))
    for field, value in pairs(j.more) do j[field] = value end
  end
  job.loaded[id] = j
  return j
end

function job.pack(j)
  if j.packed then return j.packed end
  local packed = struct.pack(JOB, unpack(j, 1, FIELDS))
  if j.more and next(j.more) then packed = packed .. cmsgpack.pack(j.more) end
  j.packed = packed
  return packed
end

-- A job that has just been submitted; clients: its part of the record, as it came.
function job.new(id, clients, score, worker)
  local packed = clients .. struct.pack(BEGUN, NOW, score, NOW, 0, 0, 0, 0, 0, 0, -1, 0, 'queued', '', '', '', worker)
  local j = job.unpack(id, packed)
  job.save(id, j)
  j.packed = packed
  return j
end

-- The record is written when the script replies; call it after the last change. Fixed fields never change.
function job.save(id, j)
  if not j.packed then return end
  at_end.records = job.write
  job.unsaved[id], j.packed = j, nil
end

-- Live records have no time to live; settled ones keep theirs. job.beside: names and strings that are stored with live ones.
function job.write()
  local live, used = job.beside, #job.beside
  for id, j in pairs(job.unsaved) do
    if job.is_live(j) then
      live[used + 1], live[used + 2] = key('job', id), job.pack(j)
      used = used + 2
    elseif j.ttl_ms then
      redis.call('SET', key('job', id), job.pack(j), 'PX', int(j.ttl_ms))
    else
      redis.call('SET', key('job', id), job.pack(j), 'XX', 'KEEPTTL')
    end
  end
  if used > 0 then redis.call('MSET', unpack(live)) end
  job.write_told()
end

function job.delete(id)
  job.unsaved[id], job.loaded[id] = nil, nil
  redis.call('DEL', key('job', id), key('ev', id), key('pay', id))
end

-- Sets what few jobs have; nil takes it away.
function job.set(id, j, field, value)
  j.more = j.more or {}
  j[field], j.more[field] = value, value
  job.save(id, j)
end

function job.is_live(j) return j[S] == 'queued' or j[S] == 'leased' or j[S] == 'running' end

-- The only place that writes a state. Returns the row, or nil where the table has none.
function job.set_state(id, j, event)
  local row = transitions.row(event, j[S])
  if row then
    j[S] = row.to
    job.save(id, j)
  end
  return row
end

-- The next moment at which a clock of this job passes.
function job.deadline(j)
  local at = j[CT] + j[TL]
  if j[S] == 'running' then
    at = math.min(at, j[RS] + j[RL])
  else
    at = math.min(at, j[WS] + j[WL])
  end
  return j.ab and math.min(at, j.ab) or at
end

function job.schedule(id, j) redis.call('ZADD', key('deadlines'), int(job.deadline(j)), id) end

function job.stand(id, j)
  redis.call('ZADD', key('q', j[C]), j[SC], id)
  if redis.call('SADD', key('classes'), j[C]) == 1 then rate.waiting_begins(j[C]) end
end

-- Waiting jobs stand in one sorted set per class, scored by enqueue time less the head start of their priority.
function job.enqueue(id, j)
  if not j.bl then job.stand(id, j) end
  limits.add(j, 1, 0)
end

-- The former run under its key has ended: it may be placed now.
function job.unblock(id, j)
  job.set(id, j, 'bl', nil)
  job.stand(id, j)
end

function job.leave_queue(class, ids)
  redis.call('ZREM', key('q', class), unpack(ids))
  if redis.call('EXISTS', key('q', class)) == 0 then redis.call('SREM', key('classes'), class) end
end

function job.dequeue(id, j)
  if not j.bl then job.leave_queue(j[C], { id }) end
  job.ends_waiting(id, j)
end

function job.ends_waiting(id, j)
  limits.add(j, -1, 0)
  if j.rv then
    local k = lease.card(j.rv)
    if k.hj == id then lease.clear_head(k) end
    job.set(id, j, 'rv', nil)
  end
end

-- A client is named, so that it counts once whatever is repeated.
function job.has_client(id, j, client)
  if client == id and j[W] ~= '' then return true end
  return j['c:' .. client] ~= nil
end

function job.remove_client(id, j, client)
  if client == id then j[W] = '' end
  job.set(id, j, 'c:' .. client, nil)
  job.set(id, j, 'e:' .. client, nil)
end

function job.has_clients(j)
  if j[W] ~= '' then return true end
  for field in pairs(j.more or {}) do
    if string.sub(field, 1, 2) == 'c:' then return true end
  end
  return false
end

-- The workers that watch a job that has more than one, each once. Events are wanted by those of e: alone.
function job.watchers(j, events_only)
  local seen, list = {}, {}
  if not events_only and j[W] ~= '' then
    seen[j[W]] = true
    list[1] = j[W]
  end
  for field, worker in pairs(j.more) do
    if #field > 2 and string.byte(field, 2) == COLON and worker ~= '' and not seen[worker] then
      if not events_only or string.byte(field) == EVENTS then
        seen[worker] = true
        list[#list + 1] = worker
      end
    end
  end
  return list
end

-- What workers are told in this call: one entry of its stream for each. News is a field <job> with nothing in it; an
-- outcome is the record, with r:<job> the result where it is small; so that entries are bounded, what is over is fetched.
function job.tell(id, j, events_only, outcome, result)
  if j.more then
    for _, worker in ipairs(job.watchers(j, events_only)) do job.tell_worker(worker, id, outcome, result) end
  elseif not events_only and j[W] ~= '' then
    job.tell_worker(j[W], id, outcome, result)
  end
end

function job.tell_worker(worker, id, outcome, result)
  at_end.records = job.write
  local entry = job.told[worker]
  if not entry then
    entry = { bytes = 0 }
    job.told[worker] = entry
  end
  local used = #entry
  entry[used + 1], entry[used + 2] = id, outcome or ''
  if result and entry.bytes + #result <= ENTRY_BYTES then
    entry.bytes = entry.bytes + #result
    entry[used + 3], entry[used + 4] = 'r:' .. id, result
  end
end

function job.write_told()
  for worker, entry in pairs(job.told) do
    local stream = key('st', worker)
    redis.call('XADD', stream, 'MAXLEN', '~', STREAM_ENTRIES, '*', unpack(entry))
    redis.call('PEXPIRE', stream, int(STREAM_TTL_MS))
  end
end
