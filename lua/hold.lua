-- Purpose: give each lock key on this node of a quorum to its lease, under at least the given fencing token. This is a
--   renewal, or the second step of a grant. The script never shortens a ttl, and takes no key from another lease. With
--   a ttl of 1, the script only asks whether the lease holds the key: a key without a ttl stays without one.
-- KEYS: [1] fence counter, [2] mark, [3 .. n+2] lock keys
-- ARGV: [1] holder, [2] length of a quarantine in ms, then for each lock key: lease id, ttl in ms, the fencing token in
--   µs with sixteen digits, and the time until which a missing key is set, in the same form, or empty if a missing key
--   has to stay missing
-- Returns: for one lock key its result, for several keys an array of results. A result is a string: held, the µs of the
--   given token; 0: the key is missing and stays so; an array of a string, the key's value: another lease holds the
--   key; an error QUARANTINE and ms: the node abstains for these ms; an error LATE and the µs of the clock: it is too
--   late to set the missing key; an error AHEAD: the token is later than both the clock and the fence counter by more
--   than a quarantine; an error FOREIGN (lua/foreign.lua): the key holds no lock of this library; any other error:
--   refused.
local counter, mark, holder, quarantine, n = KEYS[1], KEYS[2], ARGV[1], tonumber(ARGV[2]), #KEYS - 2
local time = redis.call('TIME')
local now = string.format('%010d%06d', time[1], time[2])
local refused, is_new_connection, keeps_data = nil, false, false
-- part: quarantine.lua
-- part: fence.lua
local results, result = n > 1 and {}, nil
for i = 1, n do
  local key, lease, ttl = KEYS[i + 2], ARGV[4 * i - 1], ARGV[4 * i]
  local token, latest = ARGV[4 * i + 1], ARGV[4 * i + 2]
  result = refused
  if not result then
    -- part: stored.lua
    -- part: foreign.lua
    if value and value.err then
      result = value
    elseif value and string.sub(value, 1, 36) ~= 'lh1 ' .. lease then
      result = { value }
    elseif not value and latest == '' then
      result = 0
      -- part: primary.lua
    elseif not value and now > latest then
      result = { err = 'LATE ' .. now }
    elseif tonumber(token) > math.max(now, last) + quarantine * 1000 then
      -- With this token, the fence counter would stay ahead for good, as in lua/propose.lua.
      result = { err = 'AHEAD of the clock' }
    else
      local written = token > last and redis.pcall('ZADD', counter, token, 't')
      if type(written) ~= 'table' then
        if written then last = token end
        if value and ttl == '1' then
          -- A write that changes nothing would still wake the waiters that watch the key.
          -- part: primary.lua
          written = result or 1
        elseif value then
          local left = redis.pcall('PTTL', key)
          -- Writes even if the ttl stays the same, because a replica refuses the write with READONLY.
          written = type(left) == 'number' and redis.pcall('PEXPIRE', key, math.max(left, tonumber(ttl))) or left
        else
          written = redis.pcall('SET', key, 'lh1 ' .. lease .. ' ' .. token .. ' ' .. holder, 'PX', ttl)
        end
        if value and written == 1 and string.sub(value, 38, 53) ~= token then
          written = redis.pcall('SETRANGE', key, 37, token)
        end
      end
      result = type(written) == 'table' and written.err and written or token
    end
  end
  if results then results[i] = result end
end
return results or result
