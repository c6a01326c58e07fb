#!lua flags=allow-oom
-- A run that has no group any more leaves the index that sweeps and scrapes walk. Whoever makes a group of it puts it there after
-- the group, with another time: so what was found empty before that stays.
--
-- KEYS  1 runs  2 past
-- ARGV  1 run  2 its score when it was found without groups
-- Returns  1; 0: a group was made meanwhile.
if redis.call('ZSCORE', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('ZADD', KEYS[2], ARGV[2], ARGV[1])
return 1
