-- What was seen beside the turns: merged into what is known, bounded (contracts/notes.py).
--
-- KEYS  1 notes  2 session
-- ARGV  1 JSON array of notes {kind, text, times, at}  2 the most that are kept  3 ttl in ms
-- Returns  1; or -1 no such session, -2 deleted.
local status = redis.call('HGET', KEYS[2], 'status')
if not status then return -1 end
if status == 'deleted' then return -2 end
local raw = redis.call('GET', KEYS[1])
local known = raw and cjson.decode(raw) or {counts = {}, newest = {}}
for _, note in ipairs(cjson.decode(ARGV[1])) do
  known.counts[note.kind] = (known.counts[note.kind] or 0) + note.times
  for place, one in ipairs(known.newest) do
    if one.kind == note.kind and one.text == note.text then
      note.times = note.times + one.times
      table.remove(known.newest, place)
      break
    end
  end
  table.insert(known.newest, note)
end
while #known.newest > tonumber(ARGV[2]) do table.remove(known.newest, 1) end
redis.call('SET', KEYS[1], cjson.encode(known), 'PX', ARGV[3])
return 1
