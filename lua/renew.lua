-- Purpose: put the ttl of each lock key back to what its owner asks; never shorten it, never add up.
-- KEYS: lock keys
-- ARGV: for each lock key: lease id, ttl in ms
-- Returns: for each lock key two values, code and detail:
--   1 renewed, 0 | 0 not there, 0 | 2 not this owner's, what stands there | 4 refused, the error
local out = {}
for i, key in ipairs(KEYS) do
  local held, code, detail = redis.pcall('GET', key), 0, 0
  if held and held.err then
    code, detail = 4, held.err
  elseif held and string.sub(held, 1, 36) == 'lh1 ' .. ARGV[2 * i - 1] then
    code = 1
    if redis.call('PTTL', key) < tonumber(ARGV[2 * i]) then
      code = redis.pcall('PEXPIRE', key, ARGV[2 * i])
      if code ~= 1 then code, detail = 4, code.err end
    end
  elseif held then
    code, detail = 2, string.sub(held, 1, 256)
  end
  out[2 * i - 1], out[2 * i] = code, detail
end
return out
