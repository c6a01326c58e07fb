-- Append one turn to a recording (I3), or nothing at all.
--
-- KEYS  1 session  2 doc (not read)  3 turns  4 ids  5 logprobs  6 texts  7 digests  8 numbers  9 events  10 again
-- ARGV  1 turn_id  2 partial: "1" | "0" | "open"  3 row, msgpack  4 meta, msgpack  5 ids  6 logprobs
--       7 new prompt tokens  8 completion tokens  9 constrained tokens  10 fork: "1" | "0"  11 began at  12 now
--       13 turn_id of the turn whose place this one takes, or ""
--       14 which choice of which request this is (`retries.py`), or ""  15 what it repeats was on record when it came: "1" | "0"
--       16 number of the turn that this one goes on from  17 its turn_id, or ""
--       18… one pair per text, the reply last: digest, packed text; an empty packed text is believed to be here already;
--           an empty digest is never looked up (the reply, which nothing else shares)
-- Returns  {number}; or {-1} no such session, {-2} deleted, or frozen and closed to this turn, {-6} sealed, {-3} a text believed
--          to be here is not: send all of them, {-8} what it goes on from is not here under its number.
--          The same turn_id again changes nothing unless the turn on record is still open: then this one takes its place, if it
--          has as many tokens. Else {number, element of turns}: the caller sees whether that is what it sent.
local status, sealed = unpack(redis.call('HMGET', KEYS[1], 'status', 'sealed'))
if not status then return {-1} end
if status == 'deleted' then return {-2} end
local known = redis.call('HGET', KEYS[8], ARGV[1])
local number, before  -- before: completion tokens, constrained tokens, position of the reply, of the open turn on record
if known then
  number = tonumber(string.match(known, '^%d+'))
  before = {string.match(known, '!(%d+),(%d+),(%d+)$')}
  if #before == 0 or tonumber(ARGV[8]) < tonumber(before[1]) then
    return {number, redis.call('LINDEX', KEYS[3], number)}
  end
end
if sealed then return {-6} end
if status ~= 'open' and ARGV[2] == '0' then return {-2} end
if not before and ARGV[17] ~= '' and string.match(redis.call('HGET', KEYS[8], ARGV[17]) or '', '^%d+') ~= ARGV[16] then
  return {-8}
end

-- As `TrialRetries.recorded` in retries.py. A retry: began at, count, turn_id, found, took, those waiting; of these: turn_id, partial, again.
local function supersede(earlier, later)
  redis.call('HSET', KEYS[8], earlier .. '<', later, later .. '>', earlier)
end
local function asked_again(retries)
  local mine
  for _, retry in ipairs(retries) do
    if retry[1] == ARGV[11] and not mine then mine = retry end
  end
  if mine then
    mine[3], mine[4] = ARGV[1], tonumber(ARGV[15])
    local first
    for _, one in ipairs(mine[6]) do
      if redis.call('HEXISTS', KEYS[8], one[1] .. '<') == 0 then
        if one[3] == 1 then supersede(one[1], ARGV[1])
        elseif mine[4] == 0 and (not first or (one[2] == 1 and first[2] == 0)) then first = one end
      end
    end
    if first then supersede(first[1], ARGV[1]) end
    mine[5], mine[6] = first and 1 or 0, {}
  end
  local by
  for _, retry in ipairs(retries) do
    if retry ~= mine and tonumber(retry[1]) > tonumber(ARGV[11]) and (not mine or retry[2] > mine[2]) then
      if retry[3] == '' then
        table.insert(retry[6], {ARGV[1], ARGV[2] == '0' and 0 or 1, mine and 1 or 0})
      elseif not by and (mine or retry[4] + retry[5] == 0) then
        by = retry[3]
        if not mine then retry[5] = 1 end
      end
    end
  end
  if by then supersede(ARGV[1], by) end
  redis.call('HSET', KEYS[10], ARGV[14], cmsgpack.pack(retries))
end

local refs = {}
local missing = {}
local stored = redis.call('LLEN', KEYS[6])
local reply_at = before and before[3]
for i = 18, #ARGV, 2 do
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
local retries = ARGV[14] ~= '' and redis.call('HGET', KEYS[10], ARGV[14])
if retries then asked_again(cmsgpack.unpack(retries)) end
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
