-- Purpose: make `value`, which lua/stored.lua has set, an error if it is no lock of this library. A part of
--   lua/join.lua, lua/inspect.lua and lua/claim.lua.
-- KEYS: those of the script
-- ARGV: those of the script
-- Returns: nothing; `value` is an error FOREIGN and a type, or unchanged
if value and value.err then
  if string.sub(value.err, 1, 9) == 'WRONGTYPE' then
    value = { err = 'FOREIGN ' .. (redis.pcall('TYPE', key).ok or 'value of another type') }
  end
elseif value and (#value > 255 or string.sub(value, 1, 4) ~= 'lh1 ') then
  -- A lock's mark may be behind the bytes that were read, so each waiter would append another mark to a longer value.
  value = { err = 'FOREIGN string' }
end
