-- Go on to a later key of a trial; never back.
--
-- KEYS  1 session
-- ARGV  1 rotations to have behind it; -1: one more than now
-- Returns  the rotations now; or -1 no such session, -2 deleted.
local status, rotations = unpack(redis.call('HMGET', KEYS[1], 'status', 'rotations'))
if not status then return -1 end
if status == 'deleted' then return -2 end
rotations = tonumber(rotations or '0')
local wanted = tonumber(ARGV[1])
if wanted < 0 then wanted = rotations + 1 end
if wanted <= rotations then return rotations end
redis.call('HSET', KEYS[1], 'rotations', wanted)
return wanted
