-- Purpose: set the end of a share to the given ttl from now, unless it ends later. A part of lua/renew.lua.
--   The key's ttl is written first: Redis then accepts the second write even if its memory is full.
-- KEYS: those of the script
-- ARGV: those of the script
-- Returns: nothing; sets `result`
local time = redis.call('TIME')
local now = string.format('%010d%06d', time[1], time[2])
-- part: shares.lua
-- A renewal also confirms a late grant. Other late shares stay, since this script cannot call the roll.
local set = use_shares().look(key, true)
if set and set.err then
  result = set
  if string.sub(set.err, 1, 9) == 'WRONGTYPE' then
    -- part: stored.lua
    result = value or 0
  end
elseif not set or not redis.pcall('ZSCORE', key, lease) then
  result = 0
elseif ttl == '1' then
  result = 1
  -- part: primary.lua
else
  local share, id, holder = shares.share_in(lease)
  local ends = shares.now_ms + ttl
  result = redis.pcall('PEXPIREAT', key, math.max(set.ends, ends) + 1000)
  if result == 1 then
    result = redis.pcall('ZADD', key, 'XX', 'GT', unpack(shares.members_of(share, id, holder, ends)))
    if type(result) == 'number' then result = 1 end
  end
end
