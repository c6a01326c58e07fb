-- What was counted of a run, at one moment.
--
-- KEYS  1 groups  2 ready  3 leased  4 totals  5 ledger  6 trainer
-- ARGV  1 now, or "": by this server's clock  2 with the ledger: "1" | "0"
-- Returns  {now, totals, ledger, groups that can be leased, those that are leased, JSON, {its trainer's name, epoch and last heartbeat}}
local now = ARGV[1]
if now == '' then now = string.format('%d.%06d', unpack(redis.call('TIME'))) end
local held = redis.call('ZRANGE', KEYS[3], '(' .. now, '+inf', 'BYSCORE')
local groups = {}
for first = 1, #held, 1000 do
  local some = redis.call('HMGET', KEYS[1], unpack(held, first, math.min(first + 999, #held)))
  for _, group in ipairs(some) do groups[#groups + 1] = group end
end
local ledger = ARGV[2] == '1' and redis.call('HGETALL', KEYS[5]) or {}
return {now, redis.call('HGETALL', KEYS[4]), ledger, redis.call('XLEN', KEYS[2]) - #held, groups,
  redis.call('HMGET', KEYS[6], 'name', 'epoch', 'at')}
