-- Purpose: say who has each lock key, and for how long. Changes nothing.
-- KEYS: [1 .. n] lock keys, [n+1 .. 2n] their queues
-- ARGV: none
-- Returns: for one lock key its result, for several an array of them. A result is 0: not there; a
--   string: its ttl in ms (-1: none), the length of its queue, and what stands there, with spaces between;
--   an error: FOREIGN and a type, what stands there is no lock of ours; any other error: refused.
local n = #KEYS / 2
local results, result = n > 1 and {}, nil
for i = 1, n do
  local key, queue = KEYS[i], KEYS[n + i]
  -- part: stored.lua
  -- part: foreign.lua
  result = value
  if not result then
    result = 0
  elseif not result.err then
    local left = redis.pcall('PTTL', key)
    -- `..` writes numbers of 10^14 and more with an exponent.
    left = type(left) == 'number' and string.format('%.0f', left) or left
    local queued = redis.pcall('ZCARD', queue)
    if type(queued) ~= 'number' then queued = 0 end
    result = type(left) == 'string' and left .. ' ' .. queued .. ' ' .. result or left
  end
  if results then results[i] = result end
end
return results or result
