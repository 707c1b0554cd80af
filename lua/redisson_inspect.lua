-- Purpose: return the ttl and the holder of each lock key. The script writes nothing. Clients of
--   `OtherLibrary::Redisson` call it in place of lua/inspect.lua.
-- KEYS: lock keys
-- ARGV: none
-- Returns: for one lock key its result, for several keys an array of results. A result is 0: the key is missing; a
--   string: the ttl in ms (-1: none), a space, and the field of the lease of this library that holds the key; an error
--   FOREIGN, a type, the ttl and a mark: a lock of Redisson, or a value of another program; any other error: refused.
local results, result = #KEYS > 1 and {}, nil
for i, key in ipairs(KEYS) do
  result = redis.pcall('EXISTS', key)
  if result == 1 then
    -- part: redisson_holder.lua
    if type(result) == 'number' then result = string.format('%.0f ', result) .. found end
  end
  if results then results[i] = result end
end
return results or result
