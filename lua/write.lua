-- Purpose: write or delete each fenced value, unless it was last changed under a greater fencing token. A deleted value
--   keeps its token: older tokens stay refused.
-- KEYS: value keys, hashes with the fields `token` and `value`; a deleted value has no `value`
-- ARGV: for each value key: token, mode, value. A token has twenty digits. The mode is `-` for a deletion, otherwise
--   empty; then, if the whole key gets a ttl, this ttl in ms. Without a ttl in the mode, the key keeps its ttl.
-- Returns: for one value key its result, for several keys an array of results. A result is 1: written or deleted; a
--   string: unchanged, the greater token; an error FOREIGN and a type: the key holds no fenced value of this library;
--   any other error: refused.
local results, result = #KEYS > 1 and {}, nil
for i, key in ipairs(KEYS) do
  local token, mode, value = ARGV[3 * i - 2], ARGV[3 * i - 1], ARGV[3 * i]
  -- part: token.lua
  if type(seen) == 'table' or seen ~= 0 and seen > token then
    result = seen
  else
    local deletes, ttl = string.match(mode, '^(%-?)(%d*)$')
    local set = nil
    if deletes == '-' then
      -- The token is written first: if Redis refuses the deletion afterwards, older tokens stay refused.
      set = redis.pcall('HSET', key, 'token', token)
      if type(set) == 'number' then set = redis.pcall('HDEL', key, 'value') end
    else
      set = redis.pcall('HSET', key, 'token', token, 'value', value)
    end
    if type(set) == 'number' and ttl ~= '' then set = redis.pcall('PEXPIRE', key, ttl) end
    result = type(set) == 'number' and 1 or set
  end
  if results then results[i] = result end
end
return results or result
