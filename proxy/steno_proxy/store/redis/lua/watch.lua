-- What a watcher has not seen yet, and a place from which to wait for more. The stream exists only while this is called.
--
-- KEYS  1 events  2 session  3 turns
-- ARGV  1 number of the first turn not seen  2 seconds the stream outlives this call  3 turns returned at most
-- Returns  {stream id to wait from, fields, elements of turns}; no fields: no such session.
local fields = redis.call('HGETALL', KEYS[2])
if redis.call('EXPIRE', KEYS[1], ARGV[2]) == 0 then
  if #fields == 0 then return {'0-0', fields, {}} end
  redis.call('XADD', KEYS[1], '*', 't', 'watched')
  redis.call('EXPIRE', KEYS[1], ARGV[2])
end
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1][1]
local from = tonumber(ARGV[1])
return {last, fields, redis.call('LRANGE', KEYS[3], from, from + tonumber(ARGV[3]) - 1)}
