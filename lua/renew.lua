-- Purpose: put the ttl of each lock key back to what its owner asks; never shorten it, never add up.
-- KEYS: lock keys
-- ARGV: for each lock key: lease id, ttl in ms
-- Returns: for one lock key its result, for several an array of them, or 1: all were renewed. A result
--   is 1: renewed; 0: not there; a string: not this owner's, what stands there; an error: refused.
local results, result, renewed = #KEYS > 1 and {}, nil, 0
-- MGET returns nil for keys of other types, too, so check those with GETRANGE.
local values = #KEYS >= 8 and redis.pcall('MGET', unpack(KEYS)) or {}
for i, key in ipairs(KEYS) do
  local lease, ttl = ARGV[2 * i - 1], ARGV[2 * i]
  result = values[i]
  if not result then
    -- part: stored.lua
    result = value
  end
  if not result then
    result = 0
  elseif not result.err then
    if string.sub(result, 1, 36) ~= 'lh1 ' .. lease then
      result = string.sub(result, 1, 256)
    else
      result = redis.pcall('PEXPIRE', key, ttl, 'GT')
      local is_replica = type(result) == 'table' and string.find(result.err, 'READONLY', 1, true)
      local is_old = type(result) == 'table'
      if result ~= 1 and not is_replica then
        -- It has longer than that, or no end at all, or Redis is older than 7.0 and knows no GT.
        result = redis.pcall('PTTL', key)
        if type(result) == 'number' then
          if result < tonumber(ttl) then
            result = redis.pcall('PEXPIRE', key, ttl)
          else
            -- Redis 6.2 refused GT before it wrote anything. This write makes a replica answer READONLY.
            result = is_old and redis.pcall('PEXPIRE', key, result + 1) or 1
          end
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
