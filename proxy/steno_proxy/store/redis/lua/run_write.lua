#!lua flags=allow-oom
-- What was decided of a run, if all that the decision saw is still the same (run/parts.py, RedisRun.plan).
--
-- KEYS  as run_read.lua
-- ARGV  1 msgpack: seen: {command, key, fields, what it answered}, …  ready: {group, its JSON without `o`, consumer or false}, … that
--       get ready  writes: {command, key, its arguments}, …  left: consumers that hold less
-- Returns  1; 0: something has changed, and nothing was written.
local plan = cmsgpack.unpack(ARGV[1])
for _, seen in ipairs(plan.seen) do
  local command, key, fields, before = unpack(seen)
  for i, value in ipairs(redis.call(command, KEYS[key], unpack(fields))) do
    if value ~= before[i] then return 0 end
  end
end

local TRAINERS = 'trainers'  -- the consumer group

-- Groups that never were leased are found behind the last entry that was claimed. Those before `entry` are found from now on as
-- those are whose lease was released.
local function keep_findable(entry)
  local trainers, last = redis.call('XINFO', 'GROUPS', KEYS[5])[1]
  for i = 1, #trainers, 2 do
    if trainers[i] == 'last-delivered-id' then last = trainers[i + 1] end
  end
  for _, other in ipairs(redis.call('XRANGE', KEYS[5], '(' .. last, '(' .. entry)) do
    redis.call('ZADD', KEYS[6], 'NX', 0, other[2][2])
  end
end

for _, one in ipairs(plan.ready) do
  local name, group, consumer = unpack(one)
  local fresh = redis.call('EXISTS', KEYS[5]) == 0
  local entry = redis.call('XADD', KEYS[5], '*', 'group', name)
  if fresh then redis.call('XGROUP', 'CREATE', KEYS[5], TRAINERS, '0') end
  redis.call('HSET', KEYS[1], name, '{"o":"' .. entry .. '",' .. string.sub(group, 2))
  if consumer then
    keep_findable(entry)
    redis.call('XCLAIM', KEYS[5], TRAINERS, consumer, 0, entry, 'FORCE', 'JUSTID', 'LASTID', entry)
  end
end
for _, write in ipairs(plan.writes) do
  local command, key, arguments = unpack(write)
  redis.call(command, KEYS[key], unpack(arguments))
end
-- Names of dead trainers do not pile up: one that holds nothing any more is forgotten.
for _, consumer in ipairs(plan.left) do
  if #redis.call('XPENDING', KEYS[5], TRAINERS, '-', '+', 1, consumer) == 0 then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[5], TRAINERS, consumer)
  end
end
return 1
