-- Purpose: set `channel` to the channel of the client `holder`. A part of the scripts that say `-- part: channel.lua`.
-- KEYS: those of the script
-- ARGV: those of the script
-- Returns: nothing; `channel` is the prefix of the fence counter and `~to:<holder>`
local channel = string.sub(counter, 1, -6) .. 'to:' .. (holder or '')
