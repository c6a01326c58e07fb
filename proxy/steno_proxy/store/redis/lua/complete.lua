#!lua flags=allow-oom
-- Freeze a session, once.
--
-- KEYS  1 session  2 doc  3 events
-- ARGV  1 status  2 reward as Python's repr, "" for none  3 end_reason  4 metrics, JSON  5 now  6 final: "1" | "0"
--       7 epoch of the claim under which it is ended, "" for nobody's. With final "0" the claim is let go of
-- Returns  {1, fields, doc} frozen now, or before with the same status and reward; {-1} no such session, {-2} deleted,
--          {-4, status, reward or ""} frozen with another status or reward, {-7, epoch} claimed by another launcher. A reward
--          where none was posted yet is not another reward; and a session that awaits its reward may be given up, and gets more
--          metrics.
local status, reward, final, had = unpack(redis.call('HMGET', KEYS[1], 'status', 'reward', 'final', 'metrics'))
if not status then return {-1} end
if status == 'deleted' then return {-2} end
if ARGV[7] ~= '' then
  local claim = redis.call('HGET', KEYS[1], 'claim') or '0'
  if claim ~= ARGV[7] then return {-7, claim} end
end
if status == 'open' then
  redis.call('HSET', KEYS[1], 'status', ARGV[1], 'end_reason', ARGV[3], 'ended', ARGV[5], 'updated', ARGV[5])
  redis.call('XADD', KEYS[3], 'NOMKSTREAM', 'MAXLEN', 1, '*', 't', 'end')
else
  if status ~= ARGV[1] then
    if ARGV[1] ~= 'aborted' or ARGV[6] == '0' or reward or final then return {-4, status, reward or ''} end
    redis.call('HSET', KEYS[1], 'status', ARGV[1], 'updated', ARGV[5])
  end
  if reward and reward ~= ARGV[2] then return {-4, status, reward or ''} end
end
if ARGV[2] ~= '' and redis.call('HSETNX', KEYS[1], 'reward', ARGV[2]) == 1 and status ~= 'open' then
  redis.call('HSET', KEYS[1], 'updated', ARGV[5])
end
if ARGV[6] == '1' then
  if status ~= 'open' and not final then redis.call('HSET', KEYS[1], 'updated', ARGV[5]) end
  redis.call('HSET', KEYS[1], 'final', 1)
elseif ARGV[7] ~= '' and not final and not reward then
  redis.call('HDEL', KEYS[1], 'claim_until')
end
if ARGV[4] ~= '{}' then
  if not had then
    redis.call('HSET', KEYS[1], 'metrics', ARGV[4])
  elseif ARGV[6] == '1' and not final then -- both are flat objects; of a name in both, the last is read
    redis.call('HSET', KEYS[1], 'metrics', string.sub(had, 1, -2) .. ',' .. string.sub(ARGV[4], 2))
  end
end
return {1, redis.call('HGETALL', KEYS[1]), redis.call('GET', KEYS[2])}
