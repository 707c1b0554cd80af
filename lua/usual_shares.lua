-- Purpose: look at the shares of `key` in the usual case: none has ended, all have the kind `form`, and the key's ttl
--   is right. Costs half as much as lua/shares.lua, which has to look in all other cases. A part of lua/acquire.lua and
--   lua/release.lua.
-- KEYS: those of the script
-- ARGV: those of the script
-- Returns: nothing; `ends` is the end of the newest share in ms, with its mark; 0 if the key is free; nil in all other
--   cases. `newest` is that share and its end; `now_ms` is the time in ms, as text
local newest, now_ms, ends = redis.pcall('ZRANGE', key, '-1', '-1', 'WITHSCORES'), string.sub(now, 1, 13), nil
if not newest[1] then
  ends = not newest.err and 0 or nil
elseif string.find(newest[1], '^lh1 ') and string.find(newest[1], form, 37, true) == 37 then
  local left, newest_end = redis.pcall('PTTL', key), newest[2] + 0
  local shift = type(left) == 'number' and now_ms + left - 1000 - newest_end
  local is_right = shift and shift <= 5 and shift >= -5
  if is_right and redis.pcall('ZCOUNT', key, '-inf', '(' .. now_ms) == 0 then ends = newest_end end
end
