-- hosting: which models a card is a place for, and who holds the contract of a version. Called when an agent registers or
-- publishes anew.
local hosting = {}

-- Who else lives and publishes another contract under this name and version; nil where nobody does. All in the set of a version
-- that live agree, so the first of them speaks for all; one whose session has ended is compared anew when it registers.
function hosting.holder(k, m)
  if m.contract == '' then return nil end
  local others = redis.call('SMEMBERS', key('on', m.name .. '@' .. m.version))
  table.sort(others)
  for _, id in ipairs(others) do
    local v = redis.call('HMGET', key('card', id), 's:' .. m.name, 'nm')
    if id ~= k.id and lease.card(id).sid ~= '' and v[1] then
      if v[1] == m.contract then return nil end
      return v[2] or id, v[1]
    end
  end
end

-- The models whose version is in dispute, each with the reason that people are told.
function hosting.disputes(k, models)
  local disputed = {}
  for _, m in ipairs(models) do
    local other, theirs = hosting.holder(k, m)
    if other then
      local is_same_schema = string.match(theirs, '^%S*') == string.match(m.contract, '^%S*')
      disputed[m.name] = m.name .. '@' .. m.version .. ': ' .. (is_same_schema and 'other units are' or 'another input schema is')
        .. ' published under this version by ' .. other .. '; give the entry point another version'
    end
  end
  return disputed
end

-- Has anything changed since this card published last? An agent repeats itself while a version of its is in dispute.
function hosting.is_news(k, hosted, disputed)
  if redis.call('GET', key('host', k.id)) ~= hosted.packed then return true end
  for _, m in ipairs(hosted.models) do
    if (redis.call('HGET', key('card', k.id), 'd:' .. m.name) or nil) ~= disputed[m.name] then return true end
  end
  return false
end

-- Makes one model known, and this card a place for it.
function hosting.host(k, m)
  redis.call('ZADD', key('models'), int(NOW), m.name)
  -- A model that was never loaded here says nothing of its inputs: what is known of its version stands.
  if m.contract ~= '' then redis.call('HSET', key('model', m.name), m.version, m.descriptor) end
  -- Since when it is known; no version is named so.
  redis.call('HSETNX', key('model', m.name), '@since', int(NOW))
  redis.call('HSET', key('card', k.id), 'v:' .. m.name, m.version)
  if m.contract ~= '' then redis.call('HSET', key('card', k.id), 's:' .. m.name, m.contract) end
  if m.ready == 1 then redis.call('HSET', key('card', k.id), 'm:' .. m.name, int(m.slots)) end
  local class = m.name .. '@' .. m.version
  redis.call('SADD', key('on', m.name), k.id)
  redis.call('SADD', key('on', class), k.id)
  local versions = redis.call('HKEYS', key('model', m.name))
  for i = 1, #versions - MOVE_LIMIT do
    if versions[i] ~= '@since' and redis.call('EXISTS', key('on', m.name .. '@' .. versions[i])) == 0 then
      redis.call('HDEL', key('model', m.name), versions[i])
      redis.call('HDEL', key('rate'), m.name .. '@' .. versions[i])
    end
  end
  return m.name, class
end

-- What a card hosts: names, versions, slots, descriptors; the classes whose waiters it serves. A model whose name and version
-- another living card publishes with another contract is not among it; returns these, with the reason.
-- Fields of card:<id>: m:<model> slots where it is ready, v: its version, s: its contract, d: why its version is in dispute.
function hosting.publish(k, hosted)
  local disputed = hosting.disputes(k, hosted.models)
  if hosting.is_news(k, hosted, disputed) then redis.call('HINCRBY', META, 'stamp', 1) end
  for class in string.gmatch(k.cl, '%S+') do redis.call('SREM', key('on', class), k.id) end
  for _, field in ipairs(redis.call('HKEYS', key('card', k.id))) do
    if string.find(field, '^[mvsd]:') then redis.call('HDEL', key('card', k.id), field) end
  end
  local classes = {}
  for _, m in ipairs(hosted.models) do
    if disputed[m.name] then
      redis.call('HSET', key('card', k.id), 'd:' .. m.name, disputed[m.name])
    else
      local n = #classes
      classes[n + 1], classes[n + 2] = hosting.host(k, m)
    end
  end
  k.cl, k.re, k.sl = table.concat(classes, ' '), hosted.resident, hosted.slots
  lease.republished(k)
  redis.call('SET', key('host', k.id), hosted.packed)
  local head = k.hj ~= '' and job.load(k.hj)
  if head and disputed[head[M]] then
    job.set(k.hj, head, 'rv', nil)
    lease.clear_head(k)
  end
  return disputed
end

function hosting.note_seen(k)
  redis.call('ZADD', key('cards'), int(NOW), k.id)
  for class in string.gmatch(k.cl, '%S+') do
    if not string.find(class, '@', 1, true) then redis.call('ZADD', key('models'), int(NOW), class) end
  end
end
