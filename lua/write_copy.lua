-- Purpose: store a version of each fenced value on this node of a quorum, if it is later than the node's copy, and if
--   the node cannot have lost a later one. "Fenced values of a quorum" in ARCHITECTURE.md has the rules.
--   A copy has the time of the node's mark, so a copy from before a loss of data is recognized. A node without a copy,
--   or with one of before a loss, takes this version if the caller names the mark, since the caller has read what the
--   other nodes have. It also takes a version whose token is later than all tokens that it can have lost.
-- KEYS: [1] mark, [2 .. n+1] value keys, as in lua/read_copy.lua
-- ARGV: [1] length of a quarantine in ms, then for each value key: the time of the mark that the caller has read, or
--   empty; the µs of the token; the ttl in ms, or empty to keep that of the node's copy; the version with its value, as
--   in the key
-- Returns: for one value key its result, for several keys an array of results. A result is an array of two strings: the
--   time of the mark, and the node's copy from now on, without its value, or empty; an error QUARANTINE and ms: the
--   node does not vote for so long; an error FOREIGN and a type: the key holds no copy of this library; any other
--   error: refused.
local mark, quarantine, n = KEYS[1], tonumber(ARGV[1]), #KEYS - 1
local time = redis.call('TIME')
local now = string.format('%010d%06d', time[1], time[2])
local refused, is_new_connection, keeps_data = nil, false, false
-- part: quarantine.lua
local results, result = n > 1 and {}, nil
for i = 1, n do
  local key, last, named, micros = KEYS[i + 1], 81, ARGV[4 * i - 2], tonumber(ARGV[4 * i - 1])
  local ttl, version = ARGV[4 * i], ARGV[4 * i + 1]
  result = refused
  if not result and micros > now + quarantine * 1000 then
    result = { err = 'ERR the fencing token is later than the clock by more than `max_ttl`' }
  end
  if not result then
    -- part: copy.lua
    if found.err then
      result = found
    else
      local is_kept, own, new = string.sub(found, 6, 21) == since, string.sub(found, 23, 80), string.sub(version, 1, 58)
      local may_store = is_kept or named == since or micros > since + quarantine * 1000
      if may_store and (new > own or new == own and not is_kept) then
        local text = 'lhv1 ' .. since .. ' ' .. version
        local set = ttl == '' and redis.pcall('SET', key, text, 'KEEPTTL') or redis.pcall('SET', key, text, 'PX', ttl)
        if set.err then result = set end
        found = string.sub(text, 1, 82)
      end
      result = result or { since, found }
    end
  end
  if results then results[i] = result end
end
return results or result
