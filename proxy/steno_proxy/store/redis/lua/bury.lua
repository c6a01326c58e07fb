#!lua flags=allow-oom
-- The tombstone of a session that is not in Redis: it was deleted from the archive.
--
-- KEYS  1 session
-- ARGV  1 tombstone in ms  2 created at  3 now
-- Returns  1; 0: there is a session of this name.
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('HSET', KEYS[1], 'status', 'deleted', 'created', ARGV[2], 'updated', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
