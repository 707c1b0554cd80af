-- Purpose: read the bytes of the fenced value under `key`, if they are not longer than `longest`. A part of
--   lua/read.lua and lua/claim.lua.
-- KEYS: those of the script
-- ARGV: those of the script
-- Returns: nothing; `bytes` is a string; false: the value was deleted; an error TOOLARGE; any other error: refused
local bytes = redis.pcall('HSTRLEN', key, 'value')
if type(bytes) == 'number' and bytes > longest then
  -- HGET would copy the whole value, and the client would then discard it.
  local limit = string.format('%.0f bytes (`max_reply_bytes`)', longest)
  bytes = { err = 'TOOLARGE a string of ' .. bytes .. ' bytes: longest reply ' .. limit }
elseif type(bytes) == 'number' then
  bytes = redis.pcall('HGET', key, 'value')
end
