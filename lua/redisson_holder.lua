-- Purpose: set `result` for a key that exists, and whose holder is not the lease. A part of the scripts for Redisson's
--   locks.
-- KEYS: those of the script
-- ARGV: those of the script
-- Returns: nothing; `result` is a number: a lease of this library holds the key, ms until it expires (-1: never), and
--   `found` is its field; an error FOREIGN, a type, these ms and a mark: a lock of Redisson, or a value of another
--   program. The mark has eight digits of the hash of the holder's field, or is 0 without such a field; any other
--   error: refused
-- part: redisson_field.lua
result = redis.pcall('PTTL', key)
-- The lease id has 32 digits. Redisson's own field begins with a UUID, which has 36.
if type(result) == 'number' and not (found and string.sub(found, 33, 33) == ':') then
  local mark = found and string.sub(redis.sha1hex(found), 1, 8) or '0'
  result = { err = 'FOREIGN ' .. (redis.pcall('TYPE', key).ok or 'other') .. string.format(' %.0f ', result) .. mark }
end
