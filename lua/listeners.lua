-- Purpose: set `listeners` to the number of connections to this server that listen to the shard channel of the client
--   `holder`, or to its plain channel if none listens there. A part of lua/serve.lua and lua/release.lua.
-- KEYS: those of the script
-- ARGV: those of the script
-- Returns: nothing; `listeners` is nil if an ACL forbids PUBSUB
local counted = shard and redis.pcall('PUBSUB', 'SHARDNUMSUB', shard .. holder)
local listeners = counted and counted[2] or 0
-- PUBSUB counts subscribers of this channel only. The result of PUBLISH also counts clients that listen to patterns.
if listeners == 0 then listeners = redis.pcall('PUBSUB', 'NUMSUB', channel)[2] end
