-- Purpose: replace `value`, which lua/stored.lua has set, by an error if it is not a lock of this library. A part of
--   lua/join.lua, lua/inspect.lua and lua/claim.lua.
-- KEYS: those of the script
-- ARGV: those of the script
-- Returns: nothing; `value` is an error FOREIGN and a type, or unchanged
if value and value.err then
  if string.sub(value.err, 1, 9) == 'WRONGTYPE' then
    value = { err = 'FOREIGN ' .. (redis.pcall('TYPE', key).ok or 'value of another type') }
  end
elseif value and (#value > 255 or string.match(value, '^lh1 %x+() %d+ %S') ~= 37) then
  -- A lease id has 32 digits, so it ends before position 37.
  -- In a longer value, a lock's mark may come after the bytes that were read. Then each waiter would append another
  -- mark.
  value = { err = 'FOREIGN string' }
end
