-- Purpose: turn the result of a read into READONLY on a replica, which may be behind its primary. A part of
--   the scripts that say `-- part: primary.lua`: it tries a write that changes nothing, whether `key` is
--   missing (`result` is 0) or not.
-- KEYS: those of the script
-- ARGV: those of the script
-- Returns: nothing; `result` is an error where it was read from a replica
local tried = result == 0 and redis.pcall('PEXPIRE', key, 1) or redis.pcall('PEXPIRE', key, 1, 'GT')
if type(tried) == 'table' and string.find(tried.err, 'READONLY', 1, true) then result = tried end
