-- Remove a recording, leaving a tombstone or nothing.
--
-- KEYS  1 session  2 doc  3 turns  4 ids  5 logprobs  6 texts  7 digests  8 numbers  9 events
-- ARGV  1 tombstone in ms, "0" for none  2 only if it ended at or before this time, "" for any  3 now
-- Returns  {1, fields before} removed, {0} already deleted, {-1} no such session, {-5} not what argument 2 asks for.
local fields = redis.call('HGETALL', KEYS[1])
if #fields == 0 then return {-1} end
local status, ended = unpack(redis.call('HMGET', KEYS[1], 'status', 'ended'))
if status == 'deleted' then return {0} end
if ARGV[2] ~= '' and (not ended or tonumber(ended) > tonumber(ARGV[2])) then return {-5} end
local group, created = unpack(redis.call('HMGET', KEYS[1], 'group', 'created'))
redis.call('UNLINK', unpack(KEYS, 1, 8))
if ARGV[1] ~= '0' then
  redis.call('HSET', KEYS[1], 'status', 'deleted', 'created', created, 'updated', ARGV[3])
  if group then redis.call('HSET', KEYS[1], 'group', group) end
  redis.call('PEXPIRE', KEYS[1], ARGV[1])
end
redis.call('XADD', KEYS[9], 'NOMKSTREAM', 'MAXLEN', 1, '*', 't', 'end')
return {1, fields}
