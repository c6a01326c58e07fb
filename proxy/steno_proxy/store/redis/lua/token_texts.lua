-- A worker has a tokenizer now: keep the texts of its tokens, unless some are kept. Those that no worker has had for longest go.
--
-- KEYS  1 texts  2 seen
-- ARGV  1 tokenizer  2 the most tokenizers  3 the most bytes of all their texts, which are not less than these
--       4 its texts; "": none are brought
-- Returns  1; 0: none are kept.
if ARGV[4] ~= '' then redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[4]) end
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
local time = redis.call('TIME')
redis.call('ZADD', KEYS[2], time[1] + time[2] / 1000000, ARGV[1])
if ARGV[4] == '' then return 1 end
local newest, bytes = redis.call('ZREVRANGE', KEYS[2], 0, -1), 0
for place, tokenizer in ipairs(newest) do
  bytes = bytes + redis.call('HSTRLEN', KEYS[1], tokenizer)
  if tokenizer ~= ARGV[1] and (place > tonumber(ARGV[2]) or bytes > tonumber(ARGV[3])) then
    redis.call('HDEL', KEYS[1], tokenizer)
    redis.call('ZREM', KEYS[2], tokenizer)
  end
end
return 1
