-- Purpose: read the token of the fenced value under `key`. A part of lua/read.lua, lua/write.lua and lua/claim.lua.
-- KEYS: those of the script
-- ARGV: those of the script
-- Returns: nothing; `seen` is a token of twenty digits; 0: the key is missing; an error FOREIGN and a type: the key
--   holds no fenced value of this library; any other error: refused
local length = redis.pcall('HSTRLEN', key, 'token')
local seen = length == 0 and redis.pcall('EXISTS', key) or length
-- A field of another user may have 512 MB, so only a field of twenty bytes is read.
if seen == 20 then seen = redis.pcall('HGET', key, 'token') end
if type(seen) == 'table' then
  if string.sub(seen.err, 1, 9) == 'WRONGTYPE' then
    seen = { err = 'FOREIGN ' .. (redis.pcall('TYPE', key).ok or 'value of another type') }
  end
elseif seen ~= 0 and (type(seen) == 'number' or string.find(seen, '%D') or seen > '18446744073709551615') then
  seen = { err = 'FOREIGN hash' }
end
