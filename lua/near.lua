-- Purpose: notify the waiters that are among the first eight of the queue since `gone` waiters left it: from
--   now on they ask again each second. A part of the scripts that say `-- part: near.lua`. A queue without
--   such waiters costs one command.
-- KEYS: those of the script
-- ARGV: those of the script
-- Returns: nothing
for _, entry in ipairs(redis.pcall('ZRANGE', queue, math.max(0, 8 - gone), 7)) do
  local near, holder = string.match(#entry <= 256 and entry or '', '^(%x+),[1-9]%d*,(%S+)$')
  local channel = string.sub(counter, 1, -6) .. 'to:' .. (holder or '')
  if near then redis.pcall('PUBLISH', channel, string.sub(near, 1, 16) .. ' ~ ' .. key) end
end
