-- Purpose: read 256 bytes of the value of `key`: a lock's value is shorter, and a value of another user may have
--   512 MB. A part of the scripts that say `-- part: stored.lua`.
-- KEYS: those of the script
-- ARGV: those of the script
-- Returns: nothing; `value` is the first 256 bytes, false if the key is missing, or an error
local value = redis.pcall('GETRANGE', key, '0', '255')
-- GETRANGE returns '' for a missing key, too.
if value == '' then
  local exists = redis.pcall('EXISTS', key)
  if exists ~= 1 then value = exists ~= 0 and exists end
end
