-- Purpose: replace the result of a read by the error READONLY if this server is a replica, which may be behind its
--   primary. A part of the scripts that say `-- part: primary.lua`. This part tries a write that changes nothing, since
--   `key` is missing or a string. A replica refuses the write before it reads the key.
-- KEYS: those of the script
-- ARGV: those of the script
-- Returns: nothing; `result` is an error if the server is a replica
local tried = redis.pcall('ZREM', key, '')
if type(tried) == 'table' and string.find(tried.err, 'READONLY', 1, true) then result = tried end
