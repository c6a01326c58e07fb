#!lua flags=allow-oom
-- Note how an update ended. What has ended stays so, but for a failed one that is done after all.
--
-- KEYS  1 update
-- ARGV  1 state  2 now
-- Returns  1 noted, 0 not.
local state = redis.call('HGET', KEYS[1], 'state')
if state == 'running' or (state == 'failed' and ARGV[1] == 'done') then
  redis.call('HSET', KEYS[1], 'state', ARGV[1], 'ended', ARGV[2])
  return 1
end
return 0
