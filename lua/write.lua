-- Purpose: write each fenced value, unless it was last written under a greater fencing token.
-- KEYS: value keys, hashes with the fields `token` and `value`
-- ARGV: for each value key: token, value. A token has twenty digits.
-- Returns: for one value key its result, for several keys an array of results. A result is 1: written; a string:
--   not written, the greater token; an error FOREIGN and a type: the key holds no fenced value of this library; any
--   other error: refused.
local results, result = #KEYS > 1 and {}, nil
for i, key in ipairs(KEYS) do
  local token, value = ARGV[2 * i - 1], ARGV[2 * i]
  -- part: token.lua
  if type(seen) == 'table' or seen ~= 0 and seen > token then
    result = seen
  else
    local set = redis.pcall('HSET', key, 'token', token, 'value', value)
    result = type(set) == 'number' and 1 or set
  end
  if results then results[i] = result end
end
return results or result
