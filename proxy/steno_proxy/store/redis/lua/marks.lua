-- Add marks to a session, each once.
--
-- KEYS  1 session  2 doc
-- ARGV  1 announced: "1" | "0". Lists find what has ended by its marks, so it takes more of them only if that was announced
--       2… marks
-- Returns  {1} it is open; {1, fields, doc} it has ended; {0} it has ended, and nothing was announced; or {-1} no such session,
--          {-2} deleted.
local status, marks = unpack(redis.call('HMGET', KEYS[1], 'status', 'marks'))
if not status then return {-1} end
if status == 'deleted' then return {-2} end
if status ~= 'open' and ARGV[1] == '0' then return {0} end
marks = marks and cjson.decode(marks) or {}
local seen = {}
for _, mark in ipairs(marks) do seen[mark] = true end
for i = 2, #ARGV do
  local mark = ARGV[i]
  if not seen[mark] then
    seen[mark] = true
    marks[#marks + 1] = mark
  end
end
if #marks > 0 then redis.call('HSET', KEYS[1], 'marks', cjson.encode(marks)) end
if status == 'open' then return {1} end
return {1, redis.call('HGETALL', KEYS[1]), redis.call('GET', KEYS[2])}
