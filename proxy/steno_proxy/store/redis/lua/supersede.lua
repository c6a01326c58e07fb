-- Note that a turn has taken the place of another.
--
-- KEYS  1 numbers
-- ARGV  1 turn_id of the earlier one  2 of the later one
-- Returns  1, or 0 when there is no such earlier turn (any more). What is known of either stays.
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('HSETNX', KEYS[1], ARGV[1] .. '<', ARGV[2])
redis.call('HSETNX', KEYS[1], ARGV[2] .. '>', ARGV[1])
return 1
