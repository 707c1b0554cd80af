-- Purpose: grant each free lock to its caller with a fencing token, or say for how long it is taken.
--   A token's upper part is the clock of Redis in µs, made strictly increasing by one counter.
--   A value of our own format without a ttl (an old client's crash) is given one, so that it heals.
--   A caller that has to wait may join the key's queue, which lua/serve.lua describes. ` +` at the end of
--   a lock's value tells its release to serve the queue. The requests of waiters keep the queue for ten
--   to twenty seconds beyond the lock's ttl; a request that finds the key free serves the queue first.
--   Each key stands alone: one that cannot be used never costs the others their answer.
-- KEYS: [1] fence counter, [2 .. n+1] lock keys, then the queue of each that is asked for with a queue mode
-- ARGV: [1] holder, then for each lock key: lease id, ttl in ms, and its queue mode:
--   empty: it does not wait;
--   `0`: it joins the queue, and polls;
--   `+`: it joins the queue, and is notified of its grant, which has the ttl;
--   `0` or `+` and µs: the same, at the place of that time;
--   `-`: it may be in the queue already, and does not join;
--   `-+`: as `-`, and if it joined to poll, it is notified from now on.
-- Returns: for one lock key its result, for several an array of them, or if all were granted the first
--   one's, from which the others count up. A result is a string: granted, the µs part of its fencing
--   token; a number: contended, ms until it expires; an array: queued, ms until it expires, the number of
--   waiters before it, and the µs of its place; an error: FOREIGN and a type, what stands there is no lock
--   of ours; any other error: refused.
local counter, holder, n = KEYS[1], ARGV[1], (#ARGV - 1) / 3
local time = redis.call('TIME')
-- Sixteen digits until the year 2286: as text they sort like the numbers they are. Nine of ten times no zero is
-- missing, and `string.format` would take longer.
local now = time[1] .. time[2]
if #now ~= 16 then now = string.format('%010d%06d', time[1], time[2]) end
local results, result, micros, used, head, tail = n > 1 and {}, nil, nil, nil, nil, nil
local granted, behind, refused = 0, n + 1, nil

for i = 1, n do
  local key, lease, ttl, mode = KEYS[i + 1], ARGV[3 * i - 1], ARGV[3 * i], ARGV[3 * i + 1]
  local queue = nil
  if mode ~= '' then
    behind = behind + 1
    queue = KEYS[behind]
  end
  -- A repeated request must not acquire a free key: its caller may be gone, and nobody would release it.
  -- Nor must a request that may wait while others are queued: they come first.
  local waiting = queue and redis.pcall('ZCARD', queue)
  local is_queued = queue and (mode == '-' or mode == '-+' or waiting ~= 0)
  result = nil
  if not is_queued then
    -- part: count.lua
    local value = 'lh1 ' .. lease .. ' ' .. micros .. ' ' .. holder
    result = refused or redis.pcall('SET', key, value, 'NX', 'PX', ttl)
  end
  if not result then
    -- part: join.lua
    result = join_or_confirm(key, lease, ttl, mode, queue, waiting)
    -- The key is free, but its queue cannot be used: that key may hold another type, or more than clients write.
    if result == 0 and queue and string.sub(mode, 1, 1) ~= '-' then
      local value = 'lh1 ' .. lease .. ' ' .. micros .. ' ' .. holder
      result = redis.pcall('SET', key, value, 'NX', 'PX', ttl) or 0
    end
  end
  if type(result) == 'table' and result.ok then
    result, used, granted = micros, micros, granted + 1
  end
  if results then results[i] = result end
end

local written = used and redis.pcall('SET', counter, used)
if written and written.err then
  -- A counter that cannot be written grants nothing.
  for i = 1, n do
    if type(results and results[i] or result) == 'string' then
      redis.pcall('DEL', KEYS[i + 1])
      if results then results[i] = written else result = written end
    end
  end
  granted = 0
end
return results and (granted == n and results[1] or results) or result
