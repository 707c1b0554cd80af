-- Purpose: set `last` to the fence counter. A part of lua/propose.lua and lua/hold.lua.
-- KEYS: those of the script
-- ARGV: those of the script
-- Returns: nothing; `refused` is set if the counter cannot be used
local last = redis.pcall('ZSCORE', counter, 't') or '0000000000000000'
if last.err or #last ~= 16 or string.find(last, '%D') or last > '9007199254000000' then
  local is_of_another = not last.err or string.sub(last.err, 1, 9) == 'WRONGTYPE'
  local foreign = { err = 'ERR the fence counter ' .. counter .. ' does not hold a time in µs' }
  refused = refused or is_of_another and foreign or last
end
