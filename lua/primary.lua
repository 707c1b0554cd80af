-- Purpose: turn the result of a read into READONLY on a replica, which may be behind its primary. A part of
--   the scripts that say `-- part: primary.lua`: it tries a write that changes nothing, since `key` is missing
--   or a string. A replica refuses it before it looks at the key.
-- KEYS: those of the script
-- ARGV: those of the script
-- Returns: nothing; `result` is an error where it was read from a replica
local tried = redis.pcall('ZREM', key, '')
if type(tried) == 'table' and string.find(tried.err, 'READONLY', 1, true) then result = tried end
