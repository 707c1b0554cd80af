-- Purpose: read the copy of each fenced value on this node of a quorum. "Fenced values of a quorum" in ARCHITECTURE.md
--   says how a client counts the copies. Changes nothing but the mark.
-- KEYS: [1] mark, [2 .. n+1] value keys: strings of a format word, the time of the mark when the copy was stored,
--   token, sequence, writer, and `+` and the value, or `-` for a deleted value
-- ARGV: [1] length of a quarantine in ms, [2] the longest reply for a value that the caller accepts, in bytes, then for
--   each value key: `+`, or empty to read all but the value
-- Returns: for one value key its result, for several keys an array of results. A result is an array of two strings: the
--   time of the mark, and the copy, empty if the key is missing; and a number: ms until the copy expires, negative if
--   it never does; an error QUARANTINE and ms: the node does not vote for so long; an error TOOLARGE: the copy is
--   longer than accepted, less 512 bytes for the rest of the reply; an error FOREIGN and a type: the key holds no copy
--   of this library; any other error: refused.
local mark, quarantine, longest, n = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2]), #KEYS - 1
local time = redis.call('TIME')
local now = string.format('%010d%06d', time[1], time[2])
local refused, is_new_connection, keeps_data = nil, false, false
-- part: quarantine.lua
local results, result = n > 1 and {}, nil
for i = 1, n do
  local key, last = KEYS[i + 1], ARGV[i + 2] == '+' and longest - 512 or 81
  result = refused
  if not result then
    -- part: copy.lua
    if found.err then
      result = found
    elseif #found > longest - 512 then
      local limit = string.format('%.0f bytes (`max_reply_bytes`)', longest)
      result = { err = 'TOOLARGE a copy of a fenced value: longest reply ' .. limit }
    else
      local left = redis.pcall('PTTL', key)
      result = type(left) == 'number' and { since, found, left } or left
    end
  end
  if results then results[i] = result end
end
return results or result
