-- Purpose: set `channel` to the plain channel of the client `holder`. On a Cluster, all nodes get a message on a plain
--   channel. A part of the scripts that say `-- part: channel.lua`.
-- KEYS: those of the script
-- ARGV: those of the script
-- Returns: nothing; `channel` is the prefix of the fence counter and `~to:<holder>`
local channel = string.sub(counter, 1, string.find(counter, '~', 1, true)) .. 'to:' .. holder
