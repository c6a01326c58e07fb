#!lua flags=allow-oom
-- An ended session leaves Redis, if it is still what was archived.
--
-- KEYS  those of the trial: 1 session  2 doc  3 turns  …  6 texts  …  8 numbers …  11 notes  12 annotations
-- ARGV  1 digest of its state as it was before it was read for the archive; "": only say what that is
-- Returns  the digest; "": it is not there, or may change yet (open, or takes turns); "left": it has left; "changed".
--
-- A sealed record's turns, ids, log-probabilities and texts change no more: its state is what else of it may.
local status, sealed = unpack(redis.call('HMGET', KEYS[1], 'status', 'sealed'))
if not status or status == 'open' or status == 'deleted' or not sealed then return '' end
local parts = {redis.call('LLEN', KEYS[3]), redis.call('LLEN', KEYS[6]), redis.call('GET', KEYS[2]) or '', redis.call('GET', KEYS[11]) or ''}
for _, key in ipairs({KEYS[1], KEYS[8], KEYS[12]}) do
  local flat, found = redis.call('HGETALL', key), {}
  for i = 1, #flat, 2 do
    if flat[i] ~= 'sealed' then found[#found + 1] = #flat[i] .. ':' .. flat[i] .. flat[i + 1] end
  end
  table.sort(found)
  parts[#parts + 1] = table.concat(found, '\0')
end
local state = redis.sha1hex(table.concat(parts, '\0\0'))
if ARGV[1] == '' then return state end
if ARGV[1] ~= state then return 'changed' end
redis.call('UNLINK', unpack(KEYS))
return 'left'
