-- Purpose: delete each lock key that its owner still holds; leave all others as they are.
-- KEYS: lock keys
-- ARGV: for each lock key: lease id
-- Returns: for one lock key its result, for several an array of them. A result is 1: released; 0: not
--   there; a string: not this owner's, what stands there; an error: refused.
local results, result = #KEYS > 1 and {}, nil
for i, key in ipairs(KEYS) do
  result = redis.pcall('GET', key)
  if not result then
    result = 0
  elseif not result.err then
    if string.sub(result, 1, 36) == 'lh1 ' .. ARGV[i] then
      result = redis.pcall('DEL', key)
    else
      result = string.sub(result, 1, 256)
    end
  end
  if results then results[i] = result end
end
return results or result
