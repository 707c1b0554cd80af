-- Purpose: replace the result of a read by the error READONLY if this server is a replica, which may be behind its
--   primary. A part of the scripts for Redisson's locks. This part tries a write that changes nothing, since the lease
--   has no field in the hash. A replica refuses the write before it reads the key.
-- KEYS: those of the script
-- ARGV: those of the script
-- Returns: nothing; `result` is an error if the server is a replica, or if the user has no right to `HDEL`
local tried = redis.pcall('HDEL', key, field)
if type(tried) == 'table' and string.sub(tried.err, 1, 9) ~= 'WRONGTYPE' then result = tried end
