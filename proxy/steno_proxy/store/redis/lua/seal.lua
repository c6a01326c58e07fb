#!lua flags=allow-oom
-- Before an ended session is accounted for: from here on its record takes no turn.
--
-- KEYS  1 session  2 doc
-- Returns  {fields, doc}; no fields: no such session; no doc: a tombstone of which nothing is owed. An open one is left as it is.
local status, sealed = unpack(redis.call('HMGET', KEYS[1], 'status', 'sealed'))
if status and status ~= 'open' and status ~= 'deleted' and not sealed then redis.call('HSET', KEYS[1], 'sealed', 1) end
return {redis.call('HGETALL', KEYS[1]), redis.call('GET', KEYS[2])}
