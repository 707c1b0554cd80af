-- Purpose: release each lock key that its lease still holds: delete it, and wake Redisson's waiters by a message, and
--   the first waiter of a fair lock of Redisson by a message of its own. Clients of `OtherLibrary::Redisson` call this
--   script in place of lua/release.lua.
-- KEYS: [1 .. n] lock keys, [n+1 .. 2n] the queue of Redisson's fair lock for each lock key. If the queue is in another
--   slot of a Cluster, the lock key itself
-- ARGV: for each lock key: field: the field of the lease, or `<lease id>!` for the lease of another client, which
--   loses the key by force; on a Cluster, [n+1] `shard`: Redisson may listen on shard channels
-- Returns: for one lock key its result, for several keys an array of results. A result is 1: released; 0: the key is
--   missing; a string: another lease of this library holds the key, its field; an error FOREIGN: another program has
--   written the key; any other error: refused. If the message was refused, the result is this error,
--   although the lock was released.
local n = #KEYS / 2
local results, result, has_shards = n > 1 and {}, nil, ARGV[n + 1]
for i = 1, n do
  local key, queue, field = KEYS[i], KEYS[n + i], ARGV[i]
  if string.sub(field, 33) == '!' then
    -- part: redisson_field.lua
    if found and string.sub(found, 1, 33) == string.sub(field, 1, 32) .. ':' then field = found end
  end
  result = redis.pcall('HEXISTS', key, field)
  if result == 1 then
    result = redis.pcall('DEL', key)
    if result == 1 then
      local channel = 'redisson_lock__channel:' .. (string.find(key, '{', 1, true) and key or '{' .. key .. '}')
      local published = redis.pcall('PUBLISH', channel, '0')
      -- A server before Redis 7 has no shard channels.
      if has_shards then redis.pcall('SPUBLISH', channel, '0') end
      local waiter = redis.pcall('LINDEX', queue, '0')
      if type(waiter) == 'string' and #waiter < 256 then redis.pcall('PUBLISH', channel .. ':' .. waiter, '0') end
      if type(published) == 'table' then result = published end
    end
  else
    -- part: redisson_taken.lua
  end
  if results then results[i] = result end
end
return results or result
