#!lua flags=allow-oom
-- Delete a value, if it is still the one that was read.
--
-- KEYS  1 anything
-- ARGV  1 the value
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 1
