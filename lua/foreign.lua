-- Purpose: replace `value`, which lua/stored.lua has set, by an error if it is not a lock of this library. A part of
--   lua/join.lua, lua/inspect.lua and lua/claim.lua.
-- KEYS: those of the script
-- ARGV: those of the script
-- Returns: nothing; `value` is an error FOREIGN, or unchanged. The error has the type of the key, its ttl in ms (-1:
--   none) and, for a string, eight digits of the hash of its first bytes, otherwise 0. The digits show whether another
--   holder has the key; the value is a secret of its holder.
local foreign, digits = nil, '0'
if value and value.err then
  if string.sub(value.err, 1, 9) == 'WRONGTYPE' then
    foreign = redis.pcall('TYPE', key).ok or 'other'
  end
elseif value and (#value > 255 or string.match(value, '^lh1 %x+() %d+ %S') ~= 37) then
  -- A lease id has 32 digits, so it ends before position 37.
  -- In a longer value, a lock's mark may come after the bytes that were read. Then each waiter would append another
  -- mark.
  foreign, digits = 'string', string.sub(redis.sha1hex(value), 1, 8)
end
if foreign then
  local left = redis.pcall('PTTL', key)
  if type(left) ~= 'number' then left = -1 end
  value = { err = string.format('FOREIGN %s %.0f %s', foreign, left, digits) }
end
