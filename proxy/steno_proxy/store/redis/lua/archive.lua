#!lua flags=allow-oom
-- Which sessions are in the archive, and who moves them there: one replica at a time. All on the index's slot.
--
-- KEYS  1 archiver  2 archiving  3 archived  4 blanks  5 dead  6 copies
-- ARGV  1 operation  2 token of who asks  3… its own
-- Returns  1; 0: somebody else archives (hold, begin, commit), or there was no such session (forget).
local op, token = ARGV[1], ARGV[2]
local mine = redis.call('GET', KEYS[1]) == token
if op == 'hold' then  -- 3 for how long, ms
  if not mine and not redis.call('SET', KEYS[1], token, 'NX') then return 0 end
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
elseif op == 'release' then
  if mine then redis.call('DEL', KEYS[1]) end
elseif op == 'forget' then  -- 3 trial: deleted
  local place = redis.call('HGET', KEYS[3], ARGV[3])
  if not place then return 0 end
  redis.call('HDEL', KEYS[3], ARGV[3])
  redis.call('SADD', KEYS[4], place)
  for copy in (redis.call('HGET', KEYS[6], ARGV[3]) or ''):gmatch('%S+') do redis.call('SADD', KEYS[4], copy) end
  redis.call('HDEL', KEYS[6], ARGV[3])
elseif not mine then
  return 0
elseif op == 'begin' then  -- 3 object that will be written
  redis.call('SET', KEYS[2], ARGV[3])
elseif op == 'end' then
  redis.call('DEL', KEYS[2])
elseif op == 'commit' then  -- 3… trial, place: their object is there, whole
  for i = 3, #ARGV, 2 do
    local trial, place = ARGV[i], ARGV[i + 1]
    if redis.call('ZSCORE', KEYS[5], trial) or redis.call('SISMEMBER', KEYS[4], place) == 1 then  -- deleted meanwhile
      redis.call('SADD', KEYS[4], place)
    else
      local before = redis.call('HGET', KEYS[3], trial)
      local copies = redis.call('HGET', KEYS[6], trial) or ''
      if before and before ~= place and not copies:find(before .. ' ', 1, true) then
        redis.call('HSET', KEYS[6], trial, copies .. before .. ' ')  -- it goes when the session does, and not before
      end
      redis.call('HSET', KEYS[3], trial, place)
    end
  end
  redis.call('DEL', KEYS[2])
end
return 1
