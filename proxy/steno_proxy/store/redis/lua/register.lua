-- Create a session if there is none.
--
-- KEYS  1 session  2 doc
-- ARGV  1 doc  2… the session's fields: name, value, name, value…
-- Returns  {1} created, {0, fields, doc} there was one already, {-2} deleted.
local status = redis.call('HGET', KEYS[1], 'status')
if status == 'deleted' then return {-2} end
if status then return {0, redis.call('HGETALL', KEYS[1]), redis.call('GET', KEYS[2])} end
redis.call('HSET', KEYS[1], unpack(ARGV, 2))
redis.call('SET', KEYS[2], ARGV[1])
return {1}
