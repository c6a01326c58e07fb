-- A request was refused with nothing on record: its retry repeats nobody else's turn. Nothing if that retry has come already.
--
-- KEYS  1 again  2 session
-- ARGV  1 key of the request  2 began at  3 now  4 the most that are remembered  5 ttl in ms
-- Returns  1; or -1 no such session, -2 deleted.
local status = redis.call('HGET', KEYS[2], 'status')
if not status then return -1 end
if status == 'deleted' then return -2 end
local raw = redis.call('HGET', KEYS[1], ARGV[1] .. '\0')
for _, retry in ipairs(raw and cmsgpack.unpack(raw) or {}) do
  if tonumber(retry[1]) > tonumber(ARGV[2]) then return 1 end
end
if redis.call('HINCRBY', KEYS[1], 'refused', 1) <= tonumber(ARGV[4]) then
  raw = redis.call('HGET', KEYS[1], ARGV[1])
  local times = raw and cmsgpack.unpack(raw) or {}
  times[#times + 1] = ARGV[3]
  redis.call('HSET', KEYS[1], ARGV[1], cmsgpack.pack(times))
end
redis.call('PEXPIRE', KEYS[1], ARGV[5])
return 1
