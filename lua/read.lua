-- Purpose: read each fenced value. Changes nothing.
-- KEYS: value keys, hashes with the fields `token` and `value`; a deleted value has no `value`
-- ARGV: none
-- Returns: for one value key its result, for several keys an array of results. A result is 0: the key is missing, or the
--   value was deleted; a string: the value; an error FOREIGN and a type: the key holds no fenced value of this library;
--   any other error: refused.
local results, result = #KEYS > 1 and {}, nil
for i, key in ipairs(KEYS) do
  -- part: token.lua
  result = type(seen) == 'string' and (redis.pcall('HGET', key, 'value') or 0) or seen
  if results then results[i] = result end
end
return results or result
