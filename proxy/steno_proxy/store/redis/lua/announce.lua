#!lua flags=allow-oom
-- Announce writes that are to come (index.py, step 1).
--
-- KEYS  1 pending
-- ARGV  1 now, as the replica says  2… members
--
-- Each has the later of two times: the server's, so that it is taken for what a crash left no sooner than it may be, however far
-- behind the replica's clock is; and the replica's, which may have said when the session was created.
local time = redis.call('TIME')
local at = string.format('%d.%06d', time[1], time[2])
if tonumber(ARGV[1]) > tonumber(at) then at = ARGV[1] end
for i = 2, #ARGV do redis.call('ZADD', KEYS[1], at, ARGV[i]) end
return 1
