-- Purpose: set the ttl of each lock key back to the given ttl, if the key's lease still holds it. The script never
--   shortens a ttl. It also confirms a grant that its waiter has to confirm.
--   With a ttl of 1, the script only asks whether the lease holds the key: a key without a ttl stays without one.
-- KEYS: lock keys
-- ARGV: for each lock key: lease id, ttl in ms: for a share, its first member (lua/shares.lua) in place of the lease id
-- Returns: for one lock key its result, for several keys an array of results, or 1: all were renewed. A result is 1:
--   renewed; 0: the key is missing; a string, the key's value: another lease holds the key; an error FOREIGN and a
--   type: the key holds no shares of this library; any other error: refused.
local results, result, renewed = #KEYS > 1 and {}, nil, 0
-- MGET returns nil also for keys of other types. GETRANGE then reads such keys again.
local values = #KEYS >= 8 and redis.pcall('MGET', unpack(KEYS)) or {}
for i, key in ipairs(KEYS) do
  local lease, ttl = ARGV[2 * i - 1], ARGV[2 * i]
  local is_share = #lease > 32
  result = values[i]
  if is_share then
    -- part: renew_share.lua
  elseif not result then
    -- part: stored.lua
    result = value
  end
  if is_share then
    -- The part above has set the result.
  elseif not result then
    result = 0
  elseif not result.err then
    if string.sub(result, 1, 36) ~= 'lh1 ' .. lease then
      result = string.sub(result, 1, 256)
    else
      -- A new primary, or a restarted server, may have lost the confirmation of the grant. So this script confirms the
      -- grant again. Otherwise waiters would take the key, with its mark, as soon as its ttl is short.
      local mark_at = string.find(result, ' [?!]', 55)
      if mark_at then
        local confirmed = string.sub(result, 1, mark_at - 1) .. string.sub(result, mark_at + 2)
        redis.pcall('SET', key, confirmed, 'KEEPTTL')
      end
      result = redis.pcall('PEXPIRE', key, ttl, 'GT')
      local is_replica = type(result) == 'table' and string.find(result.err, 'READONLY', 1, true)
      if result ~= 1 and not is_replica then
        -- The key has a longer ttl or none, or Redis is older than 7.0 and does not know GT.
        result = redis.pcall('PTTL', key)
        if result == -1 and ttl == '1' then
          result = 1
          -- part: primary.lua
        elseif type(result) == 'number' then
          -- Writes even if the ttl is long enough: a replica refuses the write with READONLY, and WAIT counts only
          -- writes of its own connection.
          result = redis.pcall('PEXPIRE', key, math.max(result, tonumber(ttl)))
        end
      end
    end
  end
  if result == 0 or type(result) == 'string' then
    -- part: primary.lua
  end
  if results then results[i] = result end
  if result == 1 then renewed = renewed + 1 end
end
return renewed < #KEYS and results or result
