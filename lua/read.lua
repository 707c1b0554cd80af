-- Purpose: read each fenced value. Changes nothing.
-- KEYS: value keys, hashes with the fields `token` and `value`
-- ARGV: none
-- Returns: for one value key its result, for several an array of them. A result is 0: not there; a
--   string: the value; an error: refused.
local results, result = #KEYS > 1 and {}, nil
for i, key in ipairs(KEYS) do
  result = redis.pcall('HGET', key, 'value') or 0
  if results then results[i] = result end
end
return results or result
