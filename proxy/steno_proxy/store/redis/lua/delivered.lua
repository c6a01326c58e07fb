-- Record how many completion tokens of a turn had left for the client.
--
-- KEYS  1 numbers
-- ARGV  1 turn_id  2 tokens
-- Returns  1, or 0 when there is no such turn (any more).
local known = redis.call('HGET', KEYS[1], ARGV[1])
if not known then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], string.match(known, '^%d+') .. ':' .. ARGV[2])
return 1
