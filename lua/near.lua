-- Purpose: notify the waiters that came among the first eight of the queue when `gone` waiters left it. From then on
--   they send a request each second. A part of the scripts that say `-- part: near.lua`. Without such a waiter, this
--   part costs one command.
-- KEYS: those of the script
-- ARGV: those of the script
-- Returns: nothing
local hinted, hint = redis.pcall('ZRANGE', queue, math.max(0, 8 - gone), 7), '~'
-- part: hint.lua
