-- Purpose: release each lock key as lua/release.lua does. Then wake a waiter of python-redis-lock for each key that is
--   free, as the release of that library does: its waiters wait for an element of the key's signal, a list. The end of
--   a ttl wakes none of them, so the script also signals for a key that was missing before the release.
-- KEYS: those of lua/release.lua, then for each lock key its signal
-- ARGV: those of lua/release.lua
-- Returns: the results of lua/release.lua, among them the errors FOREIGN and QUARANTINE, or one error for all keys: a
--   signal was refused, after the keys were released
local all, count = KEYS, math.floor((#KEYS - 1) / 3)
local function release()
  local KEYS = { unpack(all, 1, 2 * count + 1) }
  -- part: release.lua
end
local released, refused = release(), nil
local is_list = type(released) == 'table' and not released.err
for i = 1, count do
  local result = released
  if is_list then result = released[i] end
  if (result == 1 or result == 0) and redis.pcall('EXISTS', all[i + 1]) == 0 then
    local signal = all[2 * count + 1 + i]
    redis.pcall('DEL', signal)
    local pushed = redis.pcall('LPUSH', signal, '1')
    redis.pcall('PEXPIRE', signal, '1000')
    if type(pushed) == 'table' then refused = pushed end
  end
end
return refused or released
