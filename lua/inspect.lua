-- Purpose: return the ttl, the length of the queue and the value of each lock key. If leases share a key, return its
--   shares, as lua/shares.lua describes them. The script writes nothing, except a missing or unusable mark of a
--   quorum's node.
-- KEYS: [1 .. n] lock keys, [n+1 .. 2n] their queues, [2n+1] on a node of a quorum, its mark
-- ARGV: on a node of a quorum, [1] length of a quarantine in ms
-- Returns: for one lock key its result, for several keys an array of results. A result is 0: the key is missing; a
--   string: the ttl in ms (-1: none), the length of the queue and the value, separated by spaces; an array for a key
--   that leases share: the number of readers or permits, the length of the queue, then the first member of each share
--   and the ms until it ends, for the 100 shares that end first (of the first 1,000 members); an error FOREIGN
--   (lua/foreign.lua): the key holds no lock of this library; an error QUARANTINE and ms: the node of a quorum may have
--   lost data; any other error: refused.
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
  local newest = value and value.err and string.sub(value.err, 1, 9) == 'WRONGTYPE'
    and redis.pcall('ZRANGE', key, -1, -1, 'WITHSCORES')
  local is_shared = newest and newest[1] and string.find(newest[1], '^lh1 %x+ [rp] %d+ %d+ %d+ %S+$')
  -- part: foreign.lua
  result = refused or not is_shared and value
  if is_shared and not refused then
    -- The key expires a second after its newest share ends. So the key's ttl shows the time on the clock that the ends
    -- belong to, even if MIGRATE has moved the key to a server with another clock. Without a ttl, the clock of this
    -- server counts.
    local left, now_ms = redis.pcall('PTTL', key), nil
    if type(left) == 'number' and left >= 0 then
      now_ms = math.ceil(newest[2]) + 1000 - left
    else
      local time = redis.call('TIME')
      now_ms = tonumber(time[1] .. string.format('%03d', math.floor(time[2] / 1000)))
    end
    local members = redis.pcall('ZRANGE', key, now_ms, '+inf', 'BYSCORE', 'LIMIT', 0, 1000, 'WITHSCORES')
    local queued = redis.pcall('ZCARD', queue)
    result = { redis.pcall('ZCOUNT', key, now_ms, '+inf'), type(queued) == 'number' and queued or 0 }
    for at = 1, #members, 2 do
      if string.find(members[at], '^lh1 %x+ [rp] 1 ') and #result < 202 then
        result[#result + 1], result[#result + 2] = members[at], members[at + 1] - now_ms
      end
    end
  elseif not result then
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
