-- Purpose: set `result` for a key that does not have the field of the lease. A part of lua/redisson_renew.lua and
--   lua/redisson_release.lua.
-- KEYS: those of the script
-- ARGV: those of the script
-- Returns: nothing; `result` is 0: the key is missing; a string: another lease of this library holds the key, its
--   field; an error FOREIGN: another program has written the key; any other error: refused
if result == 0 or type(result) == 'table' and string.sub(result.err, 1, 9) == 'WRONGTYPE' then
  result = redis.pcall('EXISTS', key)
  -- part: redisson_primary.lua
  if result == 1 then
    -- part: redisson_holder.lua
    if type(result) == 'number' then result = found end
  end
end
