#!lua flags=allow-oom
-- Keep names of models, and of each the policy that was told last.
--
-- KEYS  1 names  2 policies
-- ARGV  name, policy; as often as there are names
for i = 1, #ARGV, 2 do
  redis.call('SADD', KEYS[1], ARGV[i])
  redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1])
end
