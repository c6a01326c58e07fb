-- Note that a turn's answer is not to be given to its client again.
--
-- KEYS  1 numbers
-- ARGV  1 turn_id
-- Returns  1, or 0 when there is no such turn (any more).
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], ARGV[1] .. '-', '')
return 1
