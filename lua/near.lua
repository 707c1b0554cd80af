-- Purpose: notify the waiters that have come among the first eight of the queue because `gone` waiters left it. These
--   waiters then send a request each second. A part of the scripts that say `-- part: near.lua`. This part costs one
--   command if no waiter has to be notified.
-- KEYS: those of the script
-- ARGV: those of the script
-- Returns: nothing
hint_waiters(key, redis.pcall('ZRANGE', queue, math.max(0, 8 - gone), 7), '~')
