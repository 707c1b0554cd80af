-- Purpose: read the field of the holder of `key`. A part of the scripts for Redisson's locks. A hash with several
--   fields, or with a long field, is no lock.
-- KEYS: those of the script
-- ARGV: those of the script
-- Returns: nothing; `found` is the field, or false
local found = redis.pcall('HLEN', key) == 1 and redis.pcall('HKEYS', key)[1]
if found and #found > 255 then found = false end
