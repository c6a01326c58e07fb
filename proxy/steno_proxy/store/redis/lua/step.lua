-- A training step's numbers, in the place of what was on record of it when the caller looked.
--
-- KEYS  1 steps
-- ARGV  1 the step's number  2 what was there, "" for nothing  3 what is to be there  4 the most steps that are kept
-- Returns  1; 0: something else is there.
local before = redis.call('ZRANGEBYSCORE', KEYS[1], ARGV[1], ARGV[1])[1]
if (before or '') ~= ARGV[2] then return 0 end
if before then redis.call('ZREM', KEYS[1], before) end
redis.call('ZADD', KEYS[1], ARGV[1], ARGV[3])
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -1 - tonumber(ARGV[4]))
return 1
