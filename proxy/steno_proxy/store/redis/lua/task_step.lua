-- Turns that begin from now on belong to this step of the trial's task.
--
-- KEYS  1 session
-- ARGV  1 the step's name; empty: to none
-- Returns  1; or -1 no such session, -2 ended or deleted.
local status = redis.call('HGET', KEYS[1], 'status')
if not status then return -1 end
if status ~= 'open' then return -2 end
if ARGV[1] == '' then redis.call('HDEL', KEYS[1], 'task_step') else redis.call('HSET', KEYS[1], 'task_step', ARGV[1]) end
return 1
