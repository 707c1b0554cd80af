-- Purpose: grant each free lock key to its lease with a fencing token, or return for how long the key is taken.
--   The upper part of a token is the time of Redis in µs. The fence counter makes these times strictly increasing.
--   If another program has removed the ttl of a lock, the lock gets the caller's ttl.
--   A lease may join the key's queue, which lua/serve.lua describes. The mark ` +` at the end of a lock's value makes
--   the lock's release serve the queue. The requests of waiters keep the queue for ten to twenty seconds beyond the
--   lock's ttl. A request that may join the queue and finds the key free serves the queue first.
--   An error of one key does not change the results of the other keys, except of those behind it in its set.
-- KEYS: [1] fence counter, [2 .. n+1] lock keys, then the queue of each lock key with a queue mode
-- ARGV: [1] holder, then for each lock key: lease id, ttl in ms, and its queue mode:
--   empty: the lease does not wait;
--   `0`: the lease joins the queue and polls;
--   `+`: the lease joins the queue. When it is first, Redis grants it the key with its ttl and notifies the holder;
--   `0` or `+` and µs: the lease joins at the place of this time;
--   `-`: the lease may be queued already, and does not join;
--   `-+`: the same, and Redis notifies the holder of the grant even if the lease joined to poll.
--   `>` at the start: the key belongs to a set. The script skips it unless the same call has granted the key before it;
--   `&` at the start: the same, and if the key is taken, the script gives back the set's keys before it.
--   `r` at the end: the lease is a reader. `p<weight>/<limit>` at the end: the lease asks for `<weight>` of the key's
--   `<limit>` permits. Such a lease shares the key (lua/shares.lua), and never goes past the queue.
--   Last, on a Cluster: the start of the server's shard channels, to which the script appends the holder.
-- Returns: for one lock key its result, for several keys an array of results. If all of several keys were granted, only
--   the result of the first key: the token of each further key is greater by one. A result is a string: granted, the µs
--   part of the fencing token; a number: contended, ms until the lock expires; an array: queued, ms until the lock
--   expires, the number of waiters before this waiter, and the µs of its place. If leases share the key, a contended
--   result is an array of these ms and the limit of the newest share, and a queued result ends with that limit. Nil:
--   the key was skipped, or was given back. An error FOREIGN (lua/foreign.lua): the key holds no lock of this library;
--   an error MIXED: readers and permits cannot share a key; any other error: refused.
local counter, holder, n = KEYS[1], ARGV[1], math.floor((#ARGV - 1) / 3)
local shard = ARGV[3 * n + 2]
local time = redis.call('TIME')
-- Times have sixteen digits until the year 2286, so they sort as text. `..` is faster than `string.format`, but drops
-- leading zeros of the µs: one time in ten has some.
local now = time[1] .. time[2]
if #now ~= 16 then now = string.format('%010d%06d', time[1], time[2]) end
local results, result, micros, used, head, tail = n > 1 and {}, nil, nil, nil, nil, nil
local granted, behind, refused, is_unwritten = 0, n + 1, nil, false
-- The first key of the current set, and whether all keys of the set before the current one were granted.
local first, is_open = nil, false

for i = 1, n do
  local key, lease, ttl, mode = KEYS[i + 1], ARGV[3 * i - 1], ARGV[3 * i], ARGV[3 * i + 1]
  local queue, asked, known = nil, '', nil
  local link = string.byte(mode)
  -- The bytes are those of `&` and `>`.
  if link == 38 or link == 62 then mode = string.sub(mode, 2) else first, is_open, link = i, true, nil end
  if mode ~= '' then
    behind = behind + 1
    queue = KEYS[behind]
    if mode == '+r' then
      mode, asked = '+', 'r'
    elseif mode ~= '+' then
      mode, asked = string.match(mode, '^([-+%d]*)(.*)$')
    end
  end
  -- A request for a lease that was queued must not acquire a free key: if its caller has left, the key would stay taken
  -- until its ttl ends. A request that may join must not acquire a free key while others are queued: the script serves
  -- them first.
  local waiting = is_open and queue and redis.pcall('ZCARD', queue)
  local is_queued = queue and (mode == '-' or mode == '-+' or waiting ~= 0)
  result = nil
  if asked ~= '' and waiting == 0 and string.sub(mode, 1, 1) ~= '-' then
    -- part: acquire_share.lua
  end
  -- Plain commands (src/wire/scripts/plain.rs) may have set the key for this lease, without a token that its caller can
  -- use. In this case, join.lua deletes the key, and the second pass grants it.
  for pass = 1, (result or not is_open) and 0 or 2 do
    if not is_queued and asked == '' then
      if pass == 1 then
        -- part: count.lua
      end
      local value = 'lh1 ' .. lease .. ' ' .. micros .. ' ' .. holder
      result = refused or redis.pcall('SET', key, value, 'NX', 'PX', ttl)
      if refused and redis.pcall('GETRANGE', key, '0', '52') == 'lh1 ' .. lease .. ' 0000000000000000' then
        redis.pcall('DEL', key)
      end
    end
    if not result then
      -- part: shares.lua
      -- part: join.lua
      result = join_or_confirm(key, lease, ttl, mode, asked, queue, waiting)
      -- The key is free, but its queue cannot be used: the queue has another type, or another user has made it too
      -- long.
      if result == 0 and queue and asked == '' and string.sub(mode, 1, 1) ~= '-' then
        local value = 'lh1 ' .. lease .. ' ' .. micros .. ' ' .. holder
        result = redis.pcall('SET', key, value, 'NX', 'PX', ttl) or 0
      end
    end
    if result then break end
  end
  if type(result) == 'table' and result.ok then
    result, used, granted, is_unwritten = micros, micros, granted + 1, true
  end
  if is_open and type(result) ~= 'string' then
    is_open = false
    if link == 38 and type(redis.pcall('DEL', unpack(KEYS, first + 1, i))) == 'number' then
      for given = first, i - 1 do results[given] = false end
    end
  elseif not is_open then
    result = false
  end
  if results then results[i] = result end
end

-- The counter already contains the tokens of shares and waiters.
local written = is_unwritten and redis.pcall('ZADD', counter, used, 't')
if type(written) == 'table' then
  -- If the counter was not written, a later grant could get one of these tokens again, so the script deletes the keys.
  for i = 1, n do
    if type(results and results[i] or result) == 'string' and not string.find(ARGV[3 * i + 1], '[rp]') then
      redis.pcall('DEL', KEYS[i + 1])
      if results then results[i] = written else result = written end
    end
  end
  granted = 0
end
return results and (granted == n and results[1] or results) or result
