#!lua flags=allow-oom
-- After a session was accounted for in its run: the same tokens are not booked again. A tombstone lets go of what was kept for it.
--
-- KEYS  1 session  2 doc  3 turns
-- ARGV  1 when the session was created  2 of a tombstone: its run, and what was counted of its open turns, JSON
-- Returns  1; 0 if another session has the name by now.
local status, created = unpack(redis.call('HMGET', KEYS[1], 'status', 'created'))
if created ~= ARGV[1] then return 0 end
if status ~= 'deleted' then
  redis.call('HSET', KEYS[1], 'sealed', 2)
elseif redis.call('HDEL', KEYS[1], 'owed') == 1 then
  redis.call('HSET', KEYS[1], 'late', ARGV[2])
  redis.call('UNLINK', KEYS[2], KEYS[3])
end
return 1
