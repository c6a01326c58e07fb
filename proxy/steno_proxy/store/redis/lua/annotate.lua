-- What a trainer saw in the tokens of some turns.
--
-- KEYS  1 annotations  2 session
-- ARGV  turn_id, annotation, turn_id, annotation…
-- Returns  1; or -1 no such session, -2 deleted.
local status = redis.call('HGET', KEYS[2], 'status')
if not status then return -1 end
if status == 'deleted' then return -2 end
for i = 1, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
return 1
