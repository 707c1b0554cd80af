-- Purpose: read each fenced value. Changes nothing.
-- KEYS: value keys, hashes with the fields `token` and `value`
-- ARGV: none
-- Returns: for one value key its result, for several an array of them. A result is 0: not there; a
--   string: the value; an error: FOREIGN and a type, what stands there is no value of ours; any
--   other error: refused.
local greatest = '18446744073709551615'
local results, result = #KEYS > 1 and {}, nil
for i, key in ipairs(KEYS) do
  -- The length of the token first: that of another user may have 512 MB.
  local length = redis.pcall('HSTRLEN', key, 'token')
  local seen = length == 0 and redis.pcall('EXISTS', key) or length
  if seen == 20 then seen = redis.pcall('HGET', key, 'token') end
  if type(seen) == 'table' and string.sub(seen.err, 1, 9) == 'WRONGTYPE' then
    result = { err = 'FOREIGN ' .. (redis.pcall('TYPE', key).ok or 'value of another type') }
  elseif seen == 0 or type(seen) == 'table' then
    result = seen
  elseif type(seen) == 'number' or string.find(seen, '%D') or seen > greatest then
    result = { err = 'FOREIGN hash' }
  else
    result = redis.pcall('HGET', key, 'value') or ''
  end
  if results then results[i] = result end
end
return results or result
