-- Purpose: let the holder of a ticket go on with the grant that it stands for, under a lease of its own.
--   The ticket's lease is nobody's afterwards, so a ticket is good once. The token and the mark of a queue stay.
--   A ticket with the token of another grant is refused: what is written under one that is too great would
--   make those of all later holders stale.
-- KEYS: lock keys
-- ARGV: [1] holder, then for each lock key: old lease id, the µs part of its token, lease id, and the ttl
--   in ms, or empty: what is left of it. A ttl is never shortened.
-- Returns: for one lock key its result, for several an array of them. A result is a number: adopted, ms
--   until it expires; 0: not there; a string: not the ticket's, what stands there; an error: refused.
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
        -- A key that should not be there any more, or never end, is given the shortest life.
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
