-- A request comes that its client marks as a retry: it is noted, before anybody looks for what it repeats (`retries.py`).
--
-- KEYS  1 again  2 session
-- ARGV  1 key of the request  2 began at  3 how often its client had asked before  4 n, its choices  5 now
--       6 how long a refusal counts, s  7 the most retries of one choice  8 ttl in ms  9 the most choices of all requests
-- Returns  1: it was refused before, which counts for this one retry, and nothing is noted. 0: it is noted, if there is room. -1 no such session,
--          -2 deleted.
local status = redis.call('HGET', KEYS[2], 'status')
if not status then return -1 end
if status == 'deleted' then return -2 end
local raw = redis.call('HGET', KEYS[1], ARGV[1])
if raw then
  local times = cmsgpack.unpack(raw)
  local refused = table.remove(times)
  if #times > 0 then
    redis.call('HSET', KEYS[1], ARGV[1], cmsgpack.pack(times))
  else
    redis.call('HDEL', KEYS[1], ARGV[1])
  end
  if ARGV[5] - refused < tonumber(ARGV[6]) then return 1 end
end
local full = redis.call('HLEN', KEYS[1]) + ARGV[4] > tonumber(ARGV[9])
if full and redis.call('HEXISTS', KEYS[1], ARGV[1] .. '\0') == 0 then return 0 end
for choice = 0, ARGV[4] - 1 do
  local place = ARGV[1] .. string.char(choice)
  raw = redis.call('HGET', KEYS[1], place)
  local retries = raw and cmsgpack.unpack(raw) or {}
  retries[#retries + 1] = {ARGV[2], tonumber(ARGV[3]), '', 0, 0, {}}
  if #retries > tonumber(ARGV[7]) then table.remove(retries, 1) end
  redis.call('HSET', KEYS[1], place, cmsgpack.pack(retries))
end
redis.call('PEXPIRE', KEYS[1], ARGV[8])
return 0
