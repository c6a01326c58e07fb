#!lua flags=allow-oom
-- Bring the index of sessions in line with what was read of one of them. Idempotent, and indifferent to order: what was
-- read earlier never undoes what was read later, since a session only goes forward: open, completed, aborted, deleted. Some
-- of these may be left out.
--
-- KEYS  1 pending  2 all  3 open  4 completed  5 aborted  6 ended  7 dead  8 the group's (pending again if it has none)  9 timed
--       10 archived  11 facets  12 blanks  13 copies
-- ARGV  1 trial_id  2 member of pending that this settles, "" for none
--       3 status: open | completed | aborted | deleted | missing (which one that is in the archive is not: lists keep it)
--       4 created at (missing: when it was looked for)  5 ended at, "" if it is not  6 now
--       7 when the tombstone expires (deleted)  8 when the sweep is to look at it (open), "": at once, unless it knows better
--       9 what it is found by: a list in JSON, whose first number grows with what is known; "": nothing new
-- Returns  how many sessions of the group the index still knows.
local trial, status, created, now = ARGV[1], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[6])
local gone = status == 'deleted' or status == 'missing'
local grouped = KEYS[8] ~= KEYS[1]

local function score(key)
  local found = redis.call('ZSCORE', key, trial)
  return found and tonumber(found)
end

if status == 'missing' and redis.call('HEXISTS', KEYS[10], trial) == 1 then
  redis.call('ZREM', KEYS[6], trial)
  redis.call('ZREM', KEYS[9], trial)
  if ARGV[2] ~= '' then redis.call('ZREM', KEYS[1], ARGV[2]) end
  return 1
end

local function outdated()
  local listed, dead = score(KEYS[2]), score(KEYS[7])
  if listed and listed > created then return true end  -- a later life under the same name
  if gone then return false end
  if dead and dead > now then return true end
  if listed ~= created then return false end
  return status == 'open' and not score(KEYS[3]) or status == 'completed' and score(KEYS[5])
end

if not outdated() then
  local same_life = score(KEYS[2]) == created
  local known = same_life and score(KEYS[9])
  for i = 2, 7 do redis.call('ZREM', KEYS[i], trial) end
  if status ~= 'open' then
    redis.call('ZREM', KEYS[9], trial)
  elseif not known then
    redis.call('ZADD', KEYS[9], ARGV[8] ~= '' and ARGV[8] or ARGV[6], trial)
  end
  if gone then
    redis.call('HDEL', KEYS[11], trial)
    if grouped then redis.call('ZREM', KEYS[8], trial) end
    if status == 'deleted' then
      redis.call('ZADD', KEYS[7], ARGV[7], trial)
      local place = redis.call('HGET', KEYS[10], trial)
      if place then  -- it was on its way to the archive
        redis.call('HDEL', KEYS[10], trial)
        redis.call('SADD', KEYS[12], place)
      end
      for copy in (redis.call('HGET', KEYS[13], trial) or ''):gmatch('%S+') do redis.call('SADD', KEYS[12], copy) end
      redis.call('HDEL', KEYS[13], trial)
    end
  else
    redis.call('ZADD', KEYS[2], ARGV[4], trial)
    redis.call('ZADD', KEYS[({open = 3, completed = 4, aborted = 5})[status]], ARGV[4], trial)
    if ARGV[5] ~= '' then redis.call('ZADD', KEYS[6], ARGV[5], trial) end
    if grouped then redis.call('ZADD', KEYS[8], ARGV[4], trial) end
    local before = same_life and redis.call('HGET', KEYS[11], trial)
    local function knows(line) return tonumber(line:match('^%[(%d+)')) end
    if ARGV[9] ~= '' and not (before and knows(before) > knows(ARGV[9])) then redis.call('HSET', KEYS[11], trial, ARGV[9]) end
  end
end
if ARGV[2] ~= '' then redis.call('ZREM', KEYS[1], ARGV[2]) end
return grouped and redis.call('ZCARD', KEYS[8]) or 0
