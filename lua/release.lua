-- Purpose: delete each lock key that its owner still holds; leave all others as they are.
-- KEYS: lock keys
-- ARGV: for each lock key: lease id
-- Returns: for each lock key two values, code and detail:
--   1 released, 0 | 0 not there, 0 | 2 not this owner's, what stands there | 4 refused, the error
local out = {}
for i, key in ipairs(KEYS) do
  local held, code, detail = redis.pcall('GET', key), 0, 0
  if held and held.err then
    code, detail = 4, held.err
  elseif held and string.sub(held, 1, 36) == 'lh1 ' .. ARGV[i] then
    code = redis.pcall('DEL', key)
    if code ~= 1 then code, detail = 4, code.err end
  elseif held then
    code, detail = 2, string.sub(held, 1, 256)
  end
  if #KEYS == 1 then return { code, detail } end
  out[2 * i - 1], out[2 * i] = code, detail
end
return out
