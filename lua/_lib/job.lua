-- job: the record of a job, its state, its deadlines and its place in the queue.
-- Fields of job:<id> are short so that a waiting job stays in one listpack:
--   m model (without version), c class, s state, n bytes, u units, p priority, t tenant, k digest of its key, pb payload bytes
--   a attempt, ct created, ws wait started, wl/rl/tl the three limits, sc score, sy 1 = synchronous, gw its gateway worker
--   d card, l lease, gr granted, rs run started, np times passed, rv card that is reserved for it, cr crashes, ls losses, oo OOM seen
--   al alone, ab abandoned until, bl waits for the end of its key's former run, nx the job that waits for this one's end
--   nc clients, c:<client> = worker, v:<client> = worker that watches, e:<client> = worker that watches events
--   ve version that ran it, lb leased bytes, st settled, co code, er detail, ra when to come back (ms), pk peak bytes, rt run ms
--   rb result bytes, rx result no longer stored, rq request id
local job = {}

local STREAM_TTL_MS = 120000
local COLON, EVENTS = 58, 101

function job.load(id)
  local flat = redis.call('HGETALL', key('job', id))
  if #flat == 0 then return nil end
  local j = {}
  for i = 1, #flat, 2 do j[flat[i]] = flat[i + 1] end
  return j
end

function job.set(id, j, ...)
  local pairs_ = { ... }
  for i = 1, #pairs_, 2 do j[pairs_[i]] = pairs_[i + 1] end
  redis.call('HSET', key('job', id), ...)
end

function job.unset(id, j, ...)
  for _, field in ipairs({ ... }) do j[field] = nil end
  redis.call('HDEL', key('job', id), ...)
end

function job.is_live(j) return j.s == 'queued' or j.s == 'leased' or j.s == 'running' end

-- The only place that writes a state, and further fields with it. Returns the row, or nil where the table has none.
function job.set_state(id, j, event, ...)
  local row = transition(event, j.s)
  if row then job.set(id, j, 's', row.to, ...) end
  return row
end

-- The next moment at which a clock of this job passes.
function job.deadline(j)
  local at = num(j.ct) + num(j.tl)
  if j.s == 'running' then
    at = math.min(at, num(j.rs) + num(j.rl))
  else
    at = math.min(at, num(j.ws) + num(j.wl))
  end
  if j.ab then at = math.min(at, num(j.ab)) end
  return at
end

function job.schedule(id, j) redis.call('ZADD', key('deadlines'), int(job.deadline(j)), id) end

local function tally_all(kind, j, by)
  tally(kind, by)
  tally(kind .. 'm:' .. j.m, by)
  tally(kind .. 't:' .. j.t, by)
end

function job.tally_bytes(j, sign) tally_all('b', j, sign * num(j.pb)) end

local function stand(id, j)
  redis.call('ZADD', key('q', j.c), j.sc, id)
  if redis.call('SADD', key('classes'), j.c) == 1 then rate.waiting_begins(j.c) end
end

-- Waiting jobs stand in one sorted set per class, scored by enqueue time less the head start of their priority.
function job.enqueue(id, j)
  if not j.bl then stand(id, j) end
  tally_all('w', j, 1)
end

-- The former run under its key has ended: it may be placed now.
function job.unblock(id, j)
  job.unset(id, j, 'bl')
  stand(id, j)
end

function job.dequeue(id, j)
  if not j.bl then
    redis.call('ZREM', key('q', j.c), id)
    if redis.call('EXISTS', key('q', j.c)) == 0 then redis.call('SREM', key('classes'), j.c) end
  end
  tally_all('w', j, -1)
  if j.rv then
    local k = lease.card(j.rv)
    if k.hj == id then lease.clear_head(k) end
    job.unset(id, j, 'rv')
  end
end

-- The workers that watch a job, each once. Events are wanted by those of e: alone.
function job.watchers(j, events_only)
  local seen, list = {}, {}
  for field, worker in pairs(j) do
    if #field > 2 and string.byte(field, 2) == COLON and worker ~= '' and not seen[worker] then
      if not events_only or string.byte(field) == EVENTS then
        seen[worker] = true
        list[#list + 1] = worker
      end
    end
  end
  return list
end

local prolonged = {}

function job.tell(id, j, events_only, ...)
  for _, worker in ipairs(job.watchers(j, events_only)) do
    local stream = key('st', worker)
    redis.call('XADD', stream, 'MAXLEN', '~', 4096, '*', 'j', id, ...)
    if not prolonged[worker] then
      prolonged[worker] = true
      redis.call('PEXPIRE', stream, int(STREAM_TTL_MS))
    end
  end
end
