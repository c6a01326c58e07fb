#!lua flags=allow-oom
-- Keep the name of a model no longer.
--
-- KEYS  1 names  2 policies
-- ARGV  1 name
-- Returns  1 it was kept, 0 not.
redis.call('HDEL', KEYS[2], ARGV[1])
return redis.call('SREM', KEYS[1], ARGV[1])
