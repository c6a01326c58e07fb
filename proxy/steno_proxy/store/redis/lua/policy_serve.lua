#!lua flags=allow-oom
-- Some worker serves an update: it becomes its policy's version in force, unless a newer one is.
--
-- KEYS  1 heads  2 update
-- ARGV  1 update_id  2 prefix of update keys (all on this slot)  3 ttl in s of those that nobody needs
-- Returns  1 in force, 0 not, or forgotten.
local policy = redis.call('HGET', KEYS[2], 'policy')
if not policy then return 0 end
local before = redis.call('HGET', KEYS[1], 'served:' .. policy)
if before == ARGV[1] then return 1 end
if before then
  local number = tonumber(redis.call('HGET', ARGV[2] .. before, 'number') or 0)
  if number >= tonumber(redis.call('HGET', KEYS[2], 'number')) then return 0 end
  redis.call('EXPIRE', ARGV[2] .. before, ARGV[3])
end
redis.call('PERSIST', KEYS[2])
redis.call('HSET', KEYS[1], 'served:' .. policy, ARGV[1])
return 1
