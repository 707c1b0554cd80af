-- Purpose: grant each free lock key to its lease with a fencing token, or return for how long the key is taken.
--   The upper part of a token is the time of Redis in µs. The fence counter makes these times strictly increasing.
--   A lock without a ttl, which a crashed client of an old version left, gets the caller's ttl.
--   A lease may join the key's queue, which lua/serve.lua describes. The mark ` +` at the end of a lock's value makes
--   the lock's release serve the queue. The requests of waiters keep the queue for ten to twenty seconds beyond the
--   lock's ttl. A request that may join the queue and finds the key free serves the queue first.
--   An error of one key does not change the results of the other keys.
-- KEYS: [1] fence counter, [2 .. n+1] lock keys, then the queue of each lock key with a queue mode
-- ARGV: [1] holder, then for each lock key: lease id, ttl in ms, and its queue mode:
--   empty: the lease does not wait;
--   `0`: the lease joins the queue and polls;
--   `+`: the lease joins the queue. When it is first, Redis grants it the key with its ttl and notifies the holder;
--   `0` or `+` and µs: the lease joins at the place of this time;
--   `-`: the lease may be queued already, and does not join;
--   `-+`: the same, and Redis notifies the holder of the grant even if the lease joined to poll.
--   `r` at the end: the lease is a reader. `p<weight>/<limit>` at the end: the lease asks for so many permits, of which
--   at most so many are held. Such a lease shares the key (lua/shares.lua), and never goes past the queue.
--   Last, on a Cluster: the start of the server's shard channels, to which the script appends the holder.
-- Returns: for one lock key its result, for several keys an array of results. If all keys were granted, only the
--   result of the first key; those of the other keys count up from it. A result is a string: granted, the µs part of
--   the fencing token; a number: contended, ms until the lock expires; an array: queued, ms until the lock expires, the
--   number of waiters before this waiter, and the µs of its place. If leases share the key, a contended result is an
--   array, too, and each array ends with the limit of the newest share. An error FOREIGN and a type: the key holds no
--   lock of this library; an error MIXED: readers and permits cannot share a key; any other error: refused.
local counter, holder, n = KEYS[1], ARGV[1], math.floor((#ARGV - 1) / 3)
local shard = ARGV[3 * n + 2]
local time = redis.call('TIME')
-- Times have sixteen digits until the year 2286, so they sort as text. `..` is faster than `string.format`, but drops
-- the leading zeros of the µs, which one time in ten has.
local now = time[1] .. time[2]
if #now ~= 16 then now = string.format('%010d%06d', time[1], time[2]) end
local results, result, micros, used, head, tail = n > 1 and {}, nil, nil, nil, nil, nil
local granted, behind, refused, own_shares = 0, n + 1, nil, nil

for i = 1, n do
  local key, lease, ttl, mode = KEYS[i + 1], ARGV[3 * i - 1], ARGV[3 * i], ARGV[3 * i + 1]
  local queue, asked = nil, ''
  if mode ~= '' then
    behind = behind + 1
    queue = KEYS[behind]
    mode, asked = string.match(mode, '^([-+%d]*)(.*)$')
  end
  -- A request for a lease that was queued must not acquire a free key: its caller may be gone, and then nothing would
  -- release the key. A request that may join must not acquire a free key while others are queued: the script serves
  -- them first.
  local waiting = queue and redis.pcall('ZCARD', queue)
  local is_queued = queue and (mode == '-' or mode == '-+' or waiting ~= 0)
  result = nil
  -- Plain commands may have set the key for this lease, but its caller cannot use the token
  -- (src/wire/scripts/plain.rs). In this case, join.lua deletes the key, and the second pass grants it.
  for pass = 1, 2 do
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
      -- The key is free, but its queue cannot be used: it has another type, or another user has made it too long.
      if result == 0 and queue and asked == '' and string.sub(mode, 1, 1) ~= '-' then
        local value = 'lh1 ' .. lease .. ' ' .. micros .. ' ' .. holder
        result = redis.pcall('SET', key, value, 'NX', 'PX', ttl) or 0
      end
    end
    if result then break end
  end
  if type(result) == 'table' and result.ok then
    result, used, granted = micros, micros, granted + 1
  end
  if results then results[i] = result end
end

local written = used and redis.pcall('ZADD', counter, used, 't')
if type(written) == 'table' then
  -- If the counter was not written, a later grant could get one of these tokens again, so the script deletes the keys.
  for i = 1, n do
    if type(results and results[i] or result) == 'string' then
      local own = own_shares and own_shares[i]
      if own then redis.pcall('ZREM', KEYS[i + 1], unpack(own)) else redis.pcall('DEL', KEYS[i + 1]) end
      if results then results[i] = written else result = written end
    end
  end
  granted = 0
end
return results and (granted == n and results[1] or results) or result
