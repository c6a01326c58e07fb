-- A launcher's claim of a trial, if it is still as it was when that was decided.
--
-- KEYS  1 session
-- ARGV  1 epoch before, "" for none  2 its launcher  3 when it was to expire  4 epoch now  5 launcher  6 when it expires
--       7 taken over: "1" | "0". Then the trial's key is the next one
-- Returns  1; 0: it is another by now, or the session has ended and does not await its reward.
local status, epoch, by, till, reward, final =
  unpack(redis.call('HMGET', KEYS[1], 'status', 'claim', 'claim_by', 'claim_until', 'reward', 'final'))
if status ~= 'open' and (status ~= 'completed' or reward or final) then return 0 end
if (epoch or '') ~= ARGV[1] or (by or '') ~= ARGV[2] or (till or '') ~= ARGV[3] then return 0 end
redis.call('HSET', KEYS[1], 'claim', ARGV[4], 'claim_by', ARGV[5], 'claim_until', ARGV[6])
if ARGV[7] == '1' then redis.call('HINCRBY', KEYS[1], 'rotations', 1) end
return 1
