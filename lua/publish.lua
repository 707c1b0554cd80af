-- Purpose: publish `message` for the client `holder` on its shard channel, or on the plain channel if no connection
--   listens on the shard channel: Redis 6.2 has no shard channels, and after a move of slots a client may still listen
--   to another one. A part of the scripts that say `-- part: publish.lua`.
-- KEYS: those of the script
-- ARGV: those of the script
-- Returns: nothing; `published` is a number, or an error
local published = shard and redis.pcall('SPUBLISH', shard .. holder, message) or 0
if published == 0 or type(published) == 'table' then published = redis.pcall('PUBLISH', channel, message) end
