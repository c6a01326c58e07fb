#!lua flags=allow-oom
-- Make an update the newest of its policy. The same again changes nothing, unless it has failed: then it runs again.
--
-- KEYS  1 heads  2 the policy's versions  3 update
-- ARGV  1 policy  2 version  3 digest  4 update_id  5 spec  6 now  7 prefix of update keys (all on this slot)  8 ttl in s of those
--       that nobody needs  9 `since` of one that runs again is so much later at least, in s, whatever the time is said to be
-- Returns  {1, fields} the update's, {-1} the version has another digest, {-2} the version is known and not the newest.
local posted, served = 'posted:' .. ARGV[1], redis.call('HGET', KEYS[1], 'served:' .. ARGV[1])
local state = redis.call('HGET', KEYS[3], 'state')
if state then
  if state == 'failed' then
    local since, later = ARGV[6], tonumber(redis.call('HGET', KEYS[3], 'since')) + tonumber(ARGV[9])
    if tonumber(since) < later then since = string.format('%.17g', later) end
    redis.call('HSET', KEYS[3], 'state', 'running', 'since', since)
    redis.call('HDEL', KEYS[3], 'ended')
    redis.call('HSET', KEYS[1], posted, ARGV[4] .. ' ' .. since)
  end
  return {1, redis.call('HGETALL', KEYS[3])}
end
local before = redis.call('HGET', KEYS[1], posted)
before = before and string.match(before, '^%S+')
local known = redis.call('HGET', KEYS[2], ARGV[2])
if known and known ~= ARGV[3] then return {-1} end
if known and before and redis.call('HGET', ARGV[7] .. before, 'version') ~= ARGV[2] then return {-2} end
if before then
  redis.call('HSET', ARGV[7] .. before, 'state', 'superseded')
  redis.call('HSETNX', ARGV[7] .. before, 'ended', ARGV[6])
  if before ~= served then redis.call('EXPIRE', ARGV[7] .. before, ARGV[8]) end
end
redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
redis.call('HSET', KEYS[3], 'policy', ARGV[1], 'version', ARGV[2], 'spec', ARGV[5], 'created', ARGV[6], 'since', ARGV[6],
  'state', 'running', 'number', redis.call('HINCRBY', KEYS[1], 'number:' .. ARGV[1], 1))
redis.call('HSET', KEYS[1], posted, ARGV[4] .. ' ' .. ARGV[6])
return {1, redis.call('HGETALL', KEYS[3])}
