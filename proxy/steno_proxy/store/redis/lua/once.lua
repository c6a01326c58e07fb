-- Keep what came first.
--
-- KEYS  1 anything
-- ARGV  1 value
-- Returns  nil: it is kept; else what was there before, which stays.
return redis.call('SET', KEYS[1], ARGV[1], 'NX', 'GET')
