-- Purpose: move the grant of each ticket to the caller's lease. The ticket's lease holds nothing afterwards, so a
--   ticket can be adopted only once. The token and the queue's mark stay. A ticket with the token of another grant is
--   refused: if its token were greater, a write under it would make the writes of all later holders stale.
-- KEYS: lock keys
-- ARGV: [1] holder, then for each lock key: old lease id, the µs part of its token, lease id, and the ttl
--   in ms, or empty to keep the rest of the ttl. A ttl is never shortened.
-- Returns: for one lock key its result, for several keys an array of results. A result is a number: adopted, ms
--   until the lock expires; 0: the key is missing; a string: another lease holds the key, the key's value; an error:
--   refused.
local holder, results, result = ARGV[1], #KEYS > 1 and {}, nil
for i, key in ipairs(KEYS) do
  local from, token, lease, ttl = ARGV[4 * i - 2], ARGV[4 * i - 1], ARGV[4 * i], ARGV[4 * i + 1]
  -- part: stored.lua
  result = value
  if not result then
    result = 0
  elseif not result.err then
    local micros, behind
    if string.sub(result, 1, 36) == 'lh1 ' .. from then
      micros, behind = string.match(result, '^ (%d+) %S+()', 37)
    end
    if micros == token then
      local mark = string.sub(result, behind)
      local left = redis.pcall('PTTL', key)
      if type(left) ~= 'number' then
        result = left
      else
        local asked = tonumber(ttl)
        if asked and asked > left then left = asked end
        -- A key that has no ttl, or expires in this moment, gets the shortest ttl.
        if left < 1 then left = 1 end
        local set = redis.pcall('SET', key, 'lh1 ' .. lease .. ' ' .. micros .. ' ' .. holder .. mark, 'PX', left)
        result = set.err and set or left
      end
    end
  end
  if result == 0 or type(result) == 'string' then
    -- part: primary.lua
  end
  if results then results[i] = result end
end
return results or result
