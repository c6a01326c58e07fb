#!lua flags=allow-oom
-- Remove a recording, leaving a tombstone or nothing.
--
-- KEYS  1 session  2 doc  3 turns  4 ids  5 logprobs  6 texts  7 digests  8 numbers  9 events  10 again  11 notes  12 annotations
-- ARGV  1 tombstone in ms, "0" for none  2 only if it ended at or before this time, "" for any  3 now
--       4 somebody accounts for it: "1" | "0". Then its tombstone keeps what that takes (doc, turns) until it is booked; and
--         without a tombstone it must have been booked
-- Returns  {1, fields before} removed, {0} already deleted, {-1} no such session, {-5} not what argument 2 asks for.
local fields = redis.call('HGETALL', KEYS[1])
if #fields == 0 then return {-1} end
local status, ended = unpack(redis.call('HMGET', KEYS[1], 'status', 'ended'))
if status == 'deleted' then return {0} end
if ARGV[2] ~= '' and (not ended or tonumber(ended) > tonumber(ARGV[2])) then return {-5} end
local group, created, sealed, marks = unpack(redis.call('HMGET', KEYS[1], 'group', 'created', 'sealed', 'marks'))
local owed = ARGV[4] == '1'
if owed and ARGV[1] == '0' and sealed ~= '2' then return {-5} end
redis.call('UNLINK', KEYS[1], KEYS[10], KEYS[11], KEYS[12], unpack(KEYS, 4, 8))
if ARGV[1] ~= '0' then
  redis.call('HSET', KEYS[1], 'status', 'deleted', 'created', created, 'updated', ARGV[3])
  if group then redis.call('HSET', KEYS[1], 'group', group) end
  if owed then
    redis.call('HSET', KEYS[1], 'owed', 1)
    if sealed then redis.call('HSET', KEYS[1], 'sealed', sealed) end
    if marks then redis.call('HSET', KEYS[1], 'marks', marks) end
    for i = 1, 3 do redis.call('PEXPIRE', KEYS[i], ARGV[1]) end
  end
  redis.call('PEXPIRE', KEYS[1], ARGV[1])
end
if not owed or ARGV[1] == '0' then redis.call('UNLINK', KEYS[2], KEYS[3]) end
redis.call('XADD', KEYS[9], 'NOMKSTREAM', 'MAXLEN', 1, '*', 't', 'end')
return {1, fields}
