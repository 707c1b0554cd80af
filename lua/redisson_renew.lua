-- Purpose: set the ttl of each lock key back to the given ttl, if the key's lease still holds it. The script never
--   shortens a ttl. With a ttl of 1, it only asks whether the lease holds the key. Clients of `OtherLibrary::Redisson`
--   call this script in place of lua/renew.lua.
-- KEYS: lock keys
-- ARGV: for each lock key: field, ttl in ms
-- Returns: for one lock key its result, for several keys an array of results. A result is 1: renewed; 0: the key is
--   missing; a string: another lease of this library holds the key, its field; an error FOREIGN: another program has
--   written the key; any other error: refused.
local results, result = #KEYS > 1 and {}, nil
for i, key in ipairs(KEYS) do
  local field, ttl = ARGV[2 * i - 1], ARGV[2 * i]
  result = redis.pcall('HEXISTS', key, field)
  if result == 1 then
    local left = redis.pcall('PTTL', key)
    if left == -1 and ttl == '1' then
      -- The key has no ttl, and a ttl of 1 ms would end it. This write changes nothing, and a replica refuses it.
      result = redis.pcall('HSET', key, field, '1')
      if result == 0 then result = 1 end
    else
      result = type(left) == 'number' and redis.pcall('PEXPIRE', key, math.max(left, tonumber(ttl))) or left
    end
  else
    -- part: redisson_taken.lua
  end
  if results then results[i] = result end
end
return results or result
