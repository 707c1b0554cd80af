-- Purpose: write each fenced value, unless it was last written under a greater fencing token.
-- KEYS: value keys, hashes with the fields `token` and `value`
-- ARGV: for each value key: token, value. A token has twenty digits.
-- Returns: for one value key its result, for several an array of them. A result is 1: written; a string:
--   not written, the greater token; an error: FOREIGN and a type, what stands there is no value
--   of ours; any other error: refused.
local greatest = '18446744073709551615'
local results, result = #KEYS > 1 and {}, nil
for i, key in ipairs(KEYS) do
  local token, value = ARGV[2 * i - 1], ARGV[2 * i]
  -- The length of the token first: that of another user may have 512 MB.
  local length = redis.pcall('HSTRLEN', key, 'token')
  local seen = length == 0 and redis.pcall('EXISTS', key) or length
  if seen == 20 then seen = redis.pcall('HGET', key, 'token') end
  if type(seen) == 'table' and string.sub(seen.err, 1, 9) == 'WRONGTYPE' then
    result = { err = 'FOREIGN ' .. (redis.pcall('TYPE', key).ok or 'value of another type') }
  elseif type(seen) == 'table' then
    result = seen
  elseif seen ~= 0 and (type(seen) == 'number' or string.find(seen, '%D') or seen > greatest) then
    result = { err = 'FOREIGN hash' }
  elseif seen ~= 0 and seen > token then
    result = seen
  else
    local set = redis.pcall('HSET', key, 'token', token, 'value', value)
    result = type(set) == 'number' and 1 or set
  end
  if results then results[i] = result end
end
return results or result
