-- Parts of a run, as they are at one moment: what a decision asks to see (runs/decisions.py).
--
-- KEYS  1 groups  2 docs  3 trials  4 due  5 ready  6 leased  7 totals  8 ledger  9 taken  10 trainer  11 past  12… requests
-- ARGV  1 what is asked for, msgpack (run/parts.py, RunQuery)
-- Returns  {time; {field, value, field, value, …} of groups, docs, trials, taken; {the trainer's name, epoch, last heartbeat}; what
--          requests were granted; then names: groups past their deadline, that were leased, or passed over, and can be leased,
--          that got ready and never were, that are leased; at last the next deadline and the next end of a lease, or ""}
local asked = cmsgpack.unpack(ARGV[1])
local now = string.format('%d.%06d', unpack(redis.call('TIME')))
local reply = {now, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, '', ''}
local at = asked.at and string.format('%.17g', asked.at) or now

local function add(part, command, key, fields)
  for first = 1, #fields, 1000 do
    local last = math.min(first + 999, #fields)
    local values = redis.call(command, KEYS[key], unpack(fields, first, last))
    for i, value in ipairs(values) do
      part[#part + 1] = fields[first + i - 1]
      part[#part + 1] = value
    end
  end
end

-- A group's record and its trials.
local function whole(name)
  local doc = redis.call('HGET', KEYS[2], name)
  reply[3][#reply[3] + 1] = name
  reply[3][#reply[3] + 1] = doc
  if doc then add(reply[4], 'HMGET', 3, cjson.decode(doc).trial_ids) end
end

local function groups(names, all)
  add(reply[2], 'HMGET', 1, names)
  for _, name in ipairs(all and names or {}) do whole(name) end
end

for name, ends in pairs(asked.groups) do  -- whole, if so many more ends may complete it
  local raw = redis.call('HGET', KEYS[1], name)
  reply[2][#reply[2] + 1] = name
  reply[2][#reply[2] + 1] = raw
  local group = raw and cjson.decode(raw)
  if group and group.f + ends >= group.n then whole(name) end
end
add(reply[4], 'HMGET', 3, asked.trials)
add(reply[5], 'ZMSCORE', 9, asked.taken)
if asked.trainer then reply[6] = redis.call('HMGET', KEYS[10], 'name', 'epoch', 'at') end
for number = 12, #KEYS do reply[7][number - 11] = redis.call('GET', KEYS[number]) end
if asked.due > 0 then
  reply[8] = redis.call('ZRANGE', KEYS[4], '-inf', at, 'BYSCORE', 'LIMIT', 0, asked.due)
  groups(reply[8], true)
end
if asked.most > 0 then
  reply[9] = redis.call('ZRANGE', KEYS[6], '-inf', at, 'BYSCORE')
  groups(reply[9])
  local trainers = redis.call('EXISTS', KEYS[5]) == 1 and redis.call('XINFO', 'GROUPS', KEYS[5])[1] or {}
  for i = 1, #trainers, 2 do
    if trainers[i] == 'last-delivered-id' then
      for _, entry in ipairs(redis.call('XRANGE', KEYS[5], '(' .. trainers[i + 1], '+', 'COUNT', asked.most)) do
        reply[10][#reply[10] + 1] = entry[2][2]
      end
    end
  end
  groups(reply[10], #reply[9] + #reply[10] >= asked.least)
  reply[12] = redis.call('ZRANGE', KEYS[4], '(' .. at, '+inf', 'BYSCORE', 'LIMIT', 0, 1, 'WITHSCORES')[2] or ''
  reply[13] = redis.call('ZRANGE', KEYS[6], '(' .. at, '+inf', 'BYSCORE', 'LIMIT', 0, 1, 'WITHSCORES')[2] or ''
end
if asked.leased then
  reply[11] = redis.call('ZRANGE', KEYS[6], 0, -1)
  groups(reply[11])
end
return reply
