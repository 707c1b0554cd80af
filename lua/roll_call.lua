-- Purpose: call the roll of a queue after a waiter has not confirmed its grant in time, to find the waiters that are
--   alive. A part of lua/join.lua and lua/release.lua.
--   The roll call makes all waiters silent except `entry`, the sender of this request: it adds 4 * 10^15 to their
--   places, so that they come last, and asks them to send a request at once. The request of a silent waiter gives the
--   waiter its own place back. The caller keeps the late grant for half a second, so that all living waiters can reply.
--   lua/serve.lua removes the waiters that are still silent when it reaches them. So waiters of stopped processes delay
--   the others only once, however many they are.
--   A roll call makes at most 1,000 waiters silent, and removes at most 1,000 that an earlier roll call made silent:
--   Redis serves no other client until the script ends.
-- KEYS: those of the script
-- ARGV: those of the script
-- Returns: nothing; sets `is_called` to false if there are no other waiters, or if Redis refuses a write
local missing = redis.pcall('ZRANGE', queue, '4000000000000000', 'inf', 'BYSCORE', 'LIMIT', 0, 1000)
if missing[1] then redis.pcall('ZREM', queue, unpack(missing)) end
local silent, hinted = {}, {}
local waiters = redis.pcall('ZRANGE', queue, 0, 999, 'WITHSCORES')
for i = 1, #waiters, 2 do
  if waiters[i] ~= entry then
    silent[#silent + 1] = string.format('%.0f', waiters[i + 1] + 4000000000000000)
    silent[#silent + 1] = waiters[i]
    hinted[#hinted + 1] = waiters[i]
  end
end
local moved = silent[1] and redis.pcall('ZADD', queue, unpack(silent))
is_called = type(moved) == 'number'
if is_called then hint_waiters(key, hinted, '=') end
