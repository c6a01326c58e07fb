-- Add marks to a session, each once.
--
-- KEYS  1 session
-- ARGV  1… marks
-- Returns  1; or -1 no such session, -2 deleted.
local status, marks = unpack(redis.call('HMGET', KEYS[1], 'status', 'marks'))
if not status then return -1 end
if status == 'deleted' then return -2 end
marks = marks and cjson.decode(marks) or {}
local seen = {}
for _, mark in ipairs(marks) do seen[mark] = true end
for _, mark in ipairs(ARGV) do
  if not seen[mark] then
    seen[mark] = true
    marks[#marks + 1] = mark
  end
end
if #marks > 0 then redis.call('HSET', KEYS[1], 'marks', cjson.encode(marks)) end
return 1
