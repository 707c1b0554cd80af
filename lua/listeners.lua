-- Purpose: set `listeners` to the number of connections that listen to the client `holder` on this server: on its shard
--   channel, or on its plain one. A part of lua/serve.lua and lua/release.lua.
-- KEYS: those of the script
-- ARGV: those of the script
-- Returns: nothing; `listeners` is 0 if there are none; an ACL that forbids the question makes it nil
local counted = shard and redis.pcall('PUBSUB', 'SHARDNUMSUB', shard .. holder)
local listeners = counted and counted[2] or 0
-- The result of PUBLISH would count clients that listen to patterns, too.
if listeners == 0 then listeners = redis.pcall('PUBSUB', 'NUMSUB', channel)[2] end
