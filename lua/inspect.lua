-- Purpose: return the ttl, the length of the queue and the value of each lock key. Writes nothing, except a missing or
--   unusable mark of a quorum's node.
-- KEYS: [1 .. n] lock keys, [n+1 .. 2n] their queues, [2n+1] on a node of a quorum, its mark
-- ARGV: on a node of a quorum, [1] length of a quarantine in ms
-- Returns: for one lock key its result, for several keys an array of results. A result is 0: the key is missing; a
--   string: the ttl in ms (-1: none), the length of the queue and the value, separated by spaces; an error FOREIGN
--   and a type: the key holds no lock of this library; an error QUARANTINE and ms: the node of a quorum may have lost
--   data; any other error: refused.
local n = math.floor(#KEYS / 2)
local mark, quarantine, refused = KEYS[2 * n + 1], tonumber(ARGV[1]), nil
if mark then
  local time = redis.call('TIME')
  local now = string.format('%010d%06d', time[1], time[2])
  local is_new_connection, keeps_data = false, false
  -- part: quarantine.lua
end
local results, result = n > 1 and {}, nil
for i = 1, n do
  local key, queue = KEYS[i], KEYS[n + i]
  -- part: stored.lua
  -- part: foreign.lua
  result = refused or value
  if not result then
    result = 0
  elseif not result.err then
    local left = redis.pcall('PTTL', key)
    -- `..` formats numbers of 10^14 and more with an exponent.
    left = type(left) == 'number' and string.format('%.0f', left) or left
    local queued = redis.pcall('ZCARD', queue)
    if type(queued) ~= 'number' then queued = 0 end
    result = type(left) == 'string' and left .. ' ' .. queued .. ' ' .. result or left
  end
  if results then results[i] = result end
end
return results or result
