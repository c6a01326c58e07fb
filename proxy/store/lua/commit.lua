-- Append one turn to a recording (I3), or nothing at all.
--
-- KEYS  1 session  2 doc (not read)  3 turns  4 ids  5 logprobs  6 texts  7 digests  8 numbers  9 events
-- ARGV  1 turn_id  2 partial: "1" | "0" | "open"  3 row, msgpack  4 meta, msgpack  5 ids  6 logprobs
--       7 new prompt tokens  8 completion tokens  9 constrained tokens  10 fork: "1" | "0"  11 began at  12 now
--       13 turn_id of the turn whose place this one takes, or ""
--       14… one pair per text, the reply last: digest, packed text; an empty packed text is believed to be here already;
--           an empty digest is never looked up (the reply, which nothing else shares)
-- Returns  {number}; or {-1} no such session, {-2} deleted, or frozen and closed to this turn, {-6} sealed, {-3} a text believed
--          to be here is not: send all of them. The same turn_id again returns the same number, and changes nothing unless the
--          turn on record is still open: then this one takes its place.
local status, sealed = unpack(redis.call('HMGET', KEYS[1], 'status', 'sealed'))
if not status then return {-1} end
if status == 'deleted' then return {-2} end
local known = redis.call('HGET', KEYS[8], ARGV[1])
local number, before  -- before: completion tokens, constrained tokens, position of the reply, of the open turn on record
if known then
  number = tonumber(string.match(known, '^%d+'))
  before = {string.match(known, '!(%d+),(%d+),(%d+)$')}
  if #before == 0 then return {number} end
end
if sealed then return {-6} end
if status ~= 'open' and ARGV[2] == '0' then return {-2} end

local refs = {}
local missing = {}
local stored = redis.call('LLEN', KEYS[6])
local reply_at = before and before[3]
for i = 14, #ARGV, 2 do
  local digest, packed = ARGV[i], ARGV[i + 1]
  local position = digest ~= '' and (missing[digest] or redis.call('HGET', KEYS[7], digest))
  if reply_at and digest == '' then position = reply_at end
  if not position then
    if packed == '' then return {-3} end
    position = stored + #missing / 2
    missing[#missing + 1] = digest
    missing[#missing + 1] = packed
    if digest ~= '' then missing[digest] = position end
  end
  refs[#refs + 1] = tonumber(position)
end

for i = 1, #missing, 2 do
  redis.call('RPUSH', KEYS[6], missing[i + 1])
  if missing[i] ~= '' then redis.call('HSET', KEYS[7], missing[i], missing[missing[i]]) end
end
if ARGV[13] ~= '' then redis.call('HSET', KEYS[8], ARGV[13] .. '<', ARGV[1]) end
local mark = ARGV[2] == 'open' and '!' .. ARGV[8] .. ',' .. ARGV[9] .. ',' .. refs[#refs] or ''
local entry = '\147' .. ARGV[3] .. cmsgpack.pack(refs) .. ARGV[4]
if before then
  redis.call('LSET', KEYS[3], number, entry)
  redis.call('LSET', KEYS[4], number, ARGV[5])
  redis.call('LSET', KEYS[5], number, ARGV[6])
  redis.call('LSET', KEYS[6], reply_at, ARGV[#ARGV])
  redis.call('HSET', KEYS[1], 'updated', ARGV[12])
  redis.call('HINCRBY', KEYS[1], 'completion', ARGV[8] - before[1])
  if ARGV[9] ~= before[2] then redis.call('HINCRBY', KEYS[1], 'constrained', ARGV[9] - before[2]) end
  redis.call('HSET', KEYS[8], ARGV[1], number .. mark)
  redis.call('XADD', KEYS[9], 'NOMKSTREAM', 'MAXLEN', 1, '*', 't', number)
  return {number}
end
number = redis.call('RPUSH', KEYS[3], entry) - 1
redis.call('RPUSH', KEYS[4], ARGV[5])
redis.call('RPUSH', KEYS[5], ARGV[6])
redis.call('HSET', KEYS[8], ARGV[1], number .. mark)
redis.call('HSET', KEYS[1], 'updated', ARGV[12])
redis.call('HSETNX', KEYS[1], 'first_turn', ARGV[11])
redis.call('HINCRBY', KEYS[1], 'turns', 1)
redis.call('HINCRBY', KEYS[1], 'prompt', ARGV[7])
redis.call('HINCRBY', KEYS[1], 'completion', ARGV[8])
if ARGV[9] ~= '0' then redis.call('HINCRBY', KEYS[1], 'constrained', ARGV[9]) end
if ARGV[10] == '1' then redis.call('HINCRBY', KEYS[1], 'forks', 1) end
redis.call('XADD', KEYS[9], 'NOMKSTREAM', 'MAXLEN', 1, '*', 't', number)
return {number}
