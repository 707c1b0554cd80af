-- Purpose: read each fenced value. Changes nothing.
-- KEYS: value keys, hashes with the fields `token` and `value`; a deleted value has no `value`
-- ARGV: [1] the longest value that the caller accepts, in bytes
-- Returns: for one value key its result, for several keys an array of results. A result is 0: the key is missing, or
--   the value was deleted; a string: the value; an error TOOLARGE: the value is longer than accepted; an error FOREIGN
--   and a type: the key holds no fenced value of this library; any other error: refused.
local longest, results, result = tonumber(ARGV[1]), #KEYS > 1 and {}, nil
for i, key in ipairs(KEYS) do
  -- part: token.lua
  result = seen
  if type(seen) == 'string' then
    -- part: bytes.lua
    result = bytes or 0
  end
  if results then results[i] = result end
end
return results or result
