-- Purpose: grant each free lock key to its lease on this node of a quorum, under a proposed fencing token or a greater
--   one. docs/protocol.md describes how a client counts the nodes.
--   The token is the greatest of the proposal, the time of Redis, and one more than the fence counter.
--   A lock without a ttl gets the caller's ttl, as in lua/acquire.lua. A quorum has no queues.
-- KEYS: [1] fence counter, [2] mark, [3 .. n+2] lock keys
-- ARGV: [1] holder, [2] length of a quarantine in ms, then for each lock key: lease id, ttl in ms, the proposal, and
--   the time until which the client waits for the vote: both µs with sixteen digits.
-- Returns: for one lock key its result, for several keys an array of results. A result is a string: granted, the µs of
--   the fencing token; a number: another lease holds the key, ms until the key expires; an error QUARANTINE and ms: the
--   node abstains for these ms; an error LATE and the µs of the clock: the client no longer waits for the vote; an
--   error AHEAD: the proposal is later than both the clock and the fence counter by more than a quarantine; an error
--   FOREIGN (lua/foreign.lua): the key holds no lock of this library; any other error: refused.
local counter, mark, holder, quarantine, n = KEYS[1], KEYS[2], ARGV[1], tonumber(ARGV[2]), #KEYS - 2
local time = redis.call('TIME')
local now = string.format('%010d%06d', time[1], time[2])
local refused, is_new_connection, keeps_data = nil, false, false
-- part: quarantine.lua
-- part: fence.lua
local results, result = n > 1 and {}, nil
for i = 1, n do
  local key, lease, ttl = KEYS[i + 2], ARGV[4 * i - 1], ARGV[4 * i]
  local proposal, latest = ARGV[4 * i + 1], ARGV[4 * i + 2]
  result = refused
  -- A server that was stopped or cut off carries out old requests late. Keys that it granted then would stay taken
  -- until their ttl ends.
  if not result and now > latest then result = { err = 'LATE ' .. now } end
  if not result then
    -- part: stored.lua
    -- part: foreign.lua
    if value and value.err then
      result = value
    elseif value and string.sub(value, 1, 36) == 'lh1 ' .. lease then
      result = string.sub(value, 38, 53)
    elseif value then
      result = redis.pcall('PTTL', key)
      if result == -1 then
        local healed = redis.pcall('PEXPIRE', key, ttl)
        result = healed == 1 and tonumber(ttl) or healed
      end
    elseif tonumber(proposal) > math.max(now, last) + quarantine * 1000 then
      -- The clock of another node is far ahead. With this token, the fence counter would stay ahead for good.
      result = { err = 'AHEAD of the clock' }
    else
      local micros = string.format('%016.0f', last + 1)
      if now > micros then micros = now end
      if proposal > micros then micros = proposal end
      -- The counter is written first, so no key is granted under a token beyond the counter.
      local written = redis.pcall('ZADD', counter, micros, 't')
      if type(written) == 'number' then
        last = micros
        written = redis.pcall('SET', key, 'lh1 ' .. lease .. ' ' .. micros .. ' ' .. holder, 'PX', ttl)
      end
      result = written.err and written or micros
    end
  end
  if results then results[i] = result end
end
return results or result
