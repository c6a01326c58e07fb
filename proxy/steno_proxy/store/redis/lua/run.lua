-- One run: its groups from registration to acknowledgement, and the proxy's side of the ledger (I4). What each operation means
-- is in runs.py, which does the same in memory.
--
-- KEYS  1 groups  2 docs  3 trials  4 due  5 ready  6 leased  7 totals  8 ledger  9 taken  10 trainer  11 past
--       12 request (lease)
-- ARGV  1 operation  2 now, or "": by this server's clock, so that replicas' clocks don't count  3… its own, below
-- Returns  what is said there. Times are Python's repr and stay strings in what is stored: cjson would cut them.
--
-- A group, JSON: s state, p purpose, n trials, f final ones, o its entry in the stream, y ready at, g grants, c consumer,
-- t granted at, x expires at, l grant, r released grant, a acknowledged grant, z forsaken, u used by a step that is not durable
-- yet, m made at (absent in what older proxies wrote). A trial, JSON: l life, o outcome, f final, k version -> tokens.
local groups, docs, trials, due, ready, leased, totals, ledger, taken, trainer, past = unpack(KEYS, 1, 11)
local now = ARGV[2]
if now == '' then now = string.format('%d.%06d', unpack(redis.call('TIME'))) end
local TRAINERS = 'trainers'  -- the consumer group
local woke = 0               -- groups that got ready

local function group_at(name)
  local raw = redis.call('HGET', groups, name)
  return raw and cjson.decode(raw)
end

local function save(name, group) redis.call('HSET', groups, name, cjson.encode(group)) end

local function trial_at(name)
  local raw = redis.call('HGET', trials, name)
  return raw and cjson.decode(raw)
end

local function names(group) return cjson.decode(redis.call('HGET', docs, group)).trial_ids end

local function add(prefix, tokens)
  for version, count in pairs(tokens) do redis.call('HINCRBY', ledger, prefix .. version, string.format('%d', count)) end
end

local function book(tokens, reason) add('n:' .. reason .. ':', tokens) end

local function tokens_from(first)
  local tokens = {}
  for i = first, #ARGV, 2 do tokens[ARGV[i]] = tonumber(ARGV[i + 1]) end
  return tokens
end

local function trainable(name)
  for _, trial in ipairs(names(name)) do
    local kept = trial_at(trial)
    if kept and kept.o == 'train' then
      for _, count in pairs(kept.k) do if count > 0 then return true end end
    end
  end
  return false
end

local function close(name, group)
  if group.s ~= 'running' then return end
  redis.call('ZREM', due, name)
  redis.call('HINCRBY', totals, group.p .. ':running', -1)
  if group.p == 'eval' then
    group.s = 'over'
    redis.call('HINCRBY', totals, 'eval:ended', 1)
  else
    for _, trial in ipairs(names(name)) do
      local kept = trial_at(trial)
      if kept and kept.o ~= 'train' then book(kept.k, kept.o) end
    end
    if trainable(name) then
      local fresh = redis.call('EXISTS', ready) == 0
      group.s, group.y, group.o = 'ready', now, redis.call('XADD', ready, '*', 'group', name)
      if fresh then redis.call('XGROUP', 'CREATE', ready, TRAINERS, '0') end
      woke = woke + 1
    else
      group.s = 'empty'
      redis.call('HINCRBY', totals, 'train:empty', 1)
    end
  end
  save(name, group)
end

local function drop(name)
  for _, trial in ipairs(names(name)) do redis.call('HDEL', trials, trial) end
  redis.call('HDEL', docs, name)
end

local function after(seconds) return string.format('%.6f', tonumber(now) + tonumber(seconds)) end

local function close_due(most)
  for _, name in ipairs(redis.call('ZRANGE', due, '-inf', now, 'BYSCORE', 'LIMIT', 0, most)) do
    close(name, group_at(name))
  end
end

-- Trainers that register have an epoch, and so has what they lease: `3.…` is a grant of epoch 3 (leases.py, LeaseName).
local function run_epoch() return tonumber(redis.call('HGET', trainer, 'epoch') or 0) end

local function grant_epoch(token) return tonumber(string.match(token, '^(%d+)%.')) end

local function is_superseded(token)
  local epoch = grant_epoch(token)
  return epoch and epoch < run_epoch()
end

local run = {}

-- ARGV 3 group  4 its record, JSON  5 purpose  6 trials  7 due at, or ""        Returns  groups that got ready (0)
function run.open()
  if redis.call('HEXISTS', groups, ARGV[3]) == 1 then return 0 end
  redis.call('HSET', docs, ARGV[3], ARGV[4])
  save(ARGV[3], {s = 'running', p = ARGV[5], n = tonumber(ARGV[6]), f = 0, g = 0, m = now})
  redis.call('HINCRBY', totals, ARGV[5] .. ':running', 1)
  if ARGV[5] == 'train' then redis.call('HDEL', totals, 'rollouts:over') end
  if ARGV[7] ~= '' then redis.call('ZADD', due, ARGV[7], ARGV[3]) end
  return 0
end

-- ARGV 3 group, or ""  4 trial  5 life  6 outcome  7 final: "1" | "0"  8 booked before: "1" | "0"  9… version, tokens
-- Returns  groups that got ready. Tokens count once per life of a trial: until the trial's slot says that they are booked,
-- `taken` does.
function run.ended()
  local name, trial, life, outcome, final = ARGV[3], ARGV[4], ARGV[5], ARGV[6], tonumber(ARGV[7])
  local tokens, first = tokens_from(9), ARGV[8] == '0'
  if first then
    local member = trial .. '/' .. life
    first = not redis.call('ZSCORE', taken, member)
    if first then
      redis.call('ZADD', taken, '+inf', member)
      add('s:', tokens)
    end
  end
  if name == '' then
    if first then book(tokens, 'ungrouped') end
    return 0
  end
  local group = group_at(name)
  if not group then
    if first then book(tokens, 'late') end
    return 0
  end
  local eval, before = group.p == 'eval', trial_at(trial)
  if eval and first then book(tokens, 'evaluation') end
  if before and before.l ~= life then
    if first and not eval then book(tokens, 'late') end
  elseif group.s == 'running' then
    local was = before and before.f or 0
    if not before then
      before = {l = life, o = outcome, f = final, k = tokens}
    elseif outcome == 'deleted' or before.o == 'unscored' then
      before.o, before.f = outcome, math.max(was, final)
    end
    redis.call('HSET', trials, trial, cjson.encode(before))
    group.f = group.f + before.f - was
    save(name, group)
    if group.f == group.n then close(name, group) end
  elseif not eval and not before then
    redis.call('HSET', trials, trial, cjson.encode({l = life, o = 'late', f = 1, k = {}}))
    if first then book(tokens, 'late') end
  elseif not eval and outcome == 'deleted' and before.o == 'train' and group.g == 0 then
    before.o = outcome
    redis.call('HSET', trials, trial, cjson.encode(before))
    book(before.k, 'deleted')
    if group.s == 'ready' and not trainable(name) then
      redis.call('XDEL', ready, group.o)
      group.s = 'empty'
      redis.call('HINCRBY', totals, 'train:empty', 1)
      save(name, group)
    end
  end
  return woke
end

-- ARGV 3 trial and life, as in `taken`: the trial's slot says from now on that they are booked. Returns  0
function run.settled()
  redis.call('ZADD', taken, 'XX', now, ARGV[3])
  redis.call('ZREMRANGEBYSCORE', taken, '-inf', tonumber(now) - 3600)  -- an hour: longer than any call may take
  return 0
end

-- ARGV 3 trial and turn, as in `taken`  4 reason  5… version, tokens. Returns  0
function run.late()
  if redis.call('ZADD', taken, 'NX', now, ARGV[3]) == 1 then
    local tokens = tokens_from(5)
    add('s:', tokens)
    book(tokens, ARGV[4])
  end
  return 0
end

-- ARGV 3 how many at most. Returns  {groups that got ready, groups that are known}
function run.due()
  close_due(ARGV[3])
  return {woke, redis.call('HLEN', groups)}
end

-- ARGV 3 group. Returns  {1 its trials may be dropped | 0, groups that got ready}
function run.lets_go()
  local group = group_at(ARGV[3])
  if not group or group.p == 'eval' then return {1, 0} end
  close(ARGV[3], group)
  return {(group.s == 'ready' or group.s == 'leased') and 0 or 1, woke}
end

-- ARGV 3 group  4 whether its trials are in the archive: "1"; "0": gone. Returns  groups that got ready
function run.forget()
  local name, archived = ARGV[3], ARGV[4] == '1'
  local group = group_at(name)
  if not archived then redis.call('HDEL', past, name) end
  if not group then return 0 end
  close(name, group)
  if group.s == 'ready' or group.s == 'leased' then
    group.z = 1
    save(name, group)
  else
    drop(name)
    redis.call('HDEL', groups, name)
    if archived then
      local kept = {s = group.s, p = group.p, n = group.n, f = group.f, g = group.g, m = group.m}
      redis.call('HSET', past, name, cjson.encode(kept))
    end
  end
  return woke
end

local function granted(name, group)
  local reply = {name, group.l, tostring(group.g), group.x, group.y, redis.call('HGET', docs, name)}
  for _, trial in ipairs(names(name)) do
    reply[#reply + 1] = trial
    reply[#reply + 1] = redis.call('HGET', trials, trial) or ''
  end
  return reply
end

local function grant(name, group, consumer, expires, token)
  group.s, group.c, group.t, group.x, group.l, group.g = 'leased', consumer, now, expires, token, group.g + 1
  group.u = nil
  redis.call('ZADD', leased, expires, name)
  save(name, group)
end

-- Names of dead trainers do not pile up: one that holds nothing any more is forgotten.
local function holds_less(consumer)
  if #redis.call('XPENDING', ready, TRAINERS, '-', '+', 1, consumer) == 0 then
    redis.call('XGROUP', 'DELCONSUMER', ready, TRAINERS, consumer)
  end
end

local function older(a, b)
  local a_ms, a_seq = string.match(a.o, '^(%d+)-(%d+)$')
  local b_ms, b_seq = string.match(b.o, '^(%d+)-(%d+)$')
  if a_ms ~= b_ms then return tonumber(a_ms) < tonumber(b_ms) end
  return tonumber(a_seq) < tonumber(b_seq)
end

-- Groups that were leased and are not any more, oldest ready first.
local function returned()
  local found = {}
  for _, name in ipairs(redis.call('ZRANGE', leased, '-inf', now, 'BYSCORE')) do
    local group = group_at(name)
    group.name = name
    found[#found + 1] = group
  end
  table.sort(found, older)
  return found
end

local function next_at()
  local found = redis.call('ZRANGE', due, 0, 0, 'WITHSCORES')[2]
  local held = redis.call('ZRANGE', leased, '(' .. now, '+inf', 'BYSCORE', 'LIMIT', 0, 1, 'WITHSCORES')[2]
  if found and held then return tonumber(found) < tonumber(held) and found or held end
  return found or held or ''
end

-- ARGV 3 trainer  4 "1": also from one that lives  5 how long one lives after it was heard of, s
-- Returns  {epoch, "", "", groups that can be leased again}; {0, who has the run, for how many seconds it lives yet, 0}: refused
function run.take_over()
  local name, epoch, at = unpack(redis.call('HMGET', trainer, 'name', 'epoch', 'at'))
  if name == ARGV[3] then return {tonumber(epoch), '', '', 0} end
  local left = at and tonumber(at) + tonumber(ARGV[5]) - tonumber(now) or 0
  if ARGV[4] == '0' and left > 0 then return {0, name, string.format('%.6f', left), 0} end
  epoch = redis.call('HINCRBY', trainer, 'epoch', 1)
  redis.call('HSET', trainer, 'name', ARGV[3], 'at', now)
  for _, held in ipairs(redis.call('ZRANGE', leased, 0, -1)) do
    local group = group_at(held)
    if group.s == 'leased' and grant_epoch(group.l) then
      group.s, group.l = 'ready', nil
      redis.call('ZADD', leased, 0, held)
      save(held, group)
      woke = woke + 1
    end
  end
  return {epoch, '', '', woke}
end

-- ARGV 3 trainer  4 its epoch  5 "1": it leaves. Returns  {1, the run's epoch}; {-5, the run's epoch} superseded
function run.heartbeat()
  local name, epoch, asked = redis.call('HGET', trainer, 'name'), run_epoch(), tonumber(ARGV[4])
  if asked < epoch or (asked == epoch and name ~= ARGV[3]) then return {-5, epoch} end
  redis.call('HSET', trainer, 'name', ARGV[3], 'epoch', ARGV[4], 'at', ARGV[5] == '1' and 0 or now)
  return {1, asked}
end

-- Returns  the run's epoch; 0: no trainer has ever registered
function run.epoch() return run_epoch() end

-- ARGV 3 consumer  4 most  5 at least  6 for how long, s  7 grants' prefix  8 seconds that the request is remembered, "0": not
-- Returns  {-5, the run's epoch}: superseded; else
--          {groups that got ready, when something may get ready by itself or "", now, {group, grant, grants, expires at, ready at,
--          record, trial, what is kept of it or "", trial, …}, …}: nothing granted where fewer than `at least` can be.
function run.lease()
  if is_superseded(ARGV[7]) then return {-5, run_epoch()} end
  close_due(256)
  local remembered = ARGV[8] ~= '0' and redis.call('GET', KEYS[12])
  local reply = {woke, '', now}
  if remembered then
    for _, held in ipairs(cjson.decode(remembered)) do
      local group = group_at(held[1])
      if group and group.s == 'leased' and group.l == held[2] then reply[#reply + 1] = granted(held[1], group) end
    end
    return reply
  end
  local most, again = tonumber(ARGV[4]), returned()
  local waiting = redis.call('XLEN', ready) - redis.call('ZCARD', leased) + #again
  if waiting < math.max(1, tonumber(ARGV[5])) then
    reply[2] = next_at()
    return reply
  end
  local chosen = {}
  for i = 1, math.min(most, #again) do
    local group = again[i]
    redis.call('XCLAIM', ready, TRAINERS, ARGV[3], 0, group.o, 'FORCE')
    if group.c ~= ARGV[3] then holds_less(group.c) end
    chosen[i] = {group.name, group}
    group.name = nil
  end
  if #chosen < most and redis.call('EXISTS', ready) == 1 then
    local read = redis.call('XREADGROUP', 'GROUP', TRAINERS, ARGV[3], 'COUNT', most - #chosen, 'STREAMS', ready, '>')
    for _, entry in ipairs(read and read[1][2] or {}) do chosen[#chosen + 1] = {entry[2][2], group_at(entry[2][2])} end
  end
  local held = {}
  for i, pair in ipairs(chosen) do
    grant(pair[1], pair[2], ARGV[3], after(ARGV[6]), ARGV[7] .. (i - 1))
    held[i] = {pair[1], pair[2].l}
    reply[#reply + 1] = granted(pair[1], pair[2])
  end
  if ARGV[8] ~= '0' and #held > 0 then redis.call('SET', KEYS[12], cjson.encode(held), 'EX', ARGV[8]) end
  return reply
end

-- ARGV 3 what: acknowledge | release | extend  4 group  5 grant  6 for how long, s (extend)  7 "1": used (extend)
-- Returns  {1 done, granted at, now, expires at}, now; {1, "", now, ""} before; {-1} no such group; {-4} held under another grant, or
--          not at all; {-5, the run's epoch} superseded.
function run.finish()
  local what, name, token = ARGV[3], ARGV[4], ARGV[5]
  if is_superseded(token) then return {-5, run_epoch()} end
  local group = group_at(name)
  if not group then return {-1} end
  if what == 'acknowledge' and group.a == token or what == 'release' and group.r == token then return {1, '', now, ''} end
  if group.s ~= 'leased' or group.l ~= token then return {-4} end
  if what == 'extend' then
    group.x, group.u = after(ARGV[6]), group.u or ARGV[7] == '1'
    redis.call('ZADD', leased, group.x, name)
  elseif what == 'release' then
    group.s, group.r, group.l = 'ready', token, nil
    redis.call('ZADD', leased, 0, name)
  else
    redis.call('XACK', ready, TRAINERS, group.o)
    redis.call('XDEL', ready, group.o)
    redis.call('ZREM', leased, name)
    redis.call('HINCRBY', totals, 'train:acknowledged', 1)
    holds_less(group.c)
    group.s, group.a, group.l = 'acknowledged', token, nil
    if group.z then drop(name) end
  end
  save(name, group)
  return {1, group.t, now, group.x}
end

-- ARGV 3 "1": no more training groups come, "0": more do. Returns  0
function run.rollouts()
  redis.call('HSET', totals, 'rollouts:over', ARGV[3])
  return 0
end

-- Returns  {training groups that run, that can be leased, that are leased}
function run.in_hand()
  local back = redis.call('ZCOUNT', leased, '-inf', now)
  local held = redis.call('ZCARD', leased) - back
  return {tonumber(redis.call('HGET', totals, 'train:running') or 0), redis.call('XLEN', ready) - held, held}
end

-- Returns  {totals, ledger, groups that can be leased, groups that are leased, how many of these have been used, its trainer's name,
--           epoch and last heartbeat, now}
function run.view()
  local _, waiting, held = unpack(run.in_hand())
  local used = 0
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', leased, '(' .. now, '+inf')) do
    if group_at(name).u then used = used + 1 end
  end
  return {redis.call('HGETALL', totals), redis.call('HGETALL', ledger), waiting, held, used,
    redis.call('HGET', trainer, 'name') or '', run_epoch(), redis.call('HGET', trainer, 'at') or '0', now}
end

return run[ARGV[1]]()
