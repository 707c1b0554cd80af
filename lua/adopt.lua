-- Purpose: move the grant of each ticket to the caller's lease, under a greater token. The ticket's lease holds nothing
--   afterwards, so a ticket can be adopted only once. The lock's value keeps the mark ` +` of its queue. A ticket is
--   refused if its token is later than both the clock and the fence counter: such a grant has never existed.
-- KEYS: [1] fence counter, [2 .. n+1] lock keys
-- ARGV: [1] holder, then for each lock key: old lease id, the µs part of its token with sixteen digits, lease id, and
--   the ttl in ms, or empty to keep the rest of the ttl. A ttl is never shortened.
-- Returns: for one lock key its result, for several keys an array of results. A result is an array of a number and a
--   string: adopted, ms until the lock expires, and the µs part of the new token; 0: the key is missing; a string, the
--   key's value: another lease holds the key, or the ticket is refused; an error: refused.
local counter, holder, n = KEYS[1], ARGV[1], #KEYS - 1
local time = redis.call('TIME')
local now = string.format('%010d%06d', time[1], time[2])
local results, result, micros, used, head, tail, refused = n > 1 and {}, nil, nil, nil, nil, nil, nil
for i = 1, n do
  local key, from, token = KEYS[i + 1], ARGV[4 * i - 2], ARGV[4 * i - 1]
  local lease, ttl = ARGV[4 * i], ARGV[4 * i + 1]
  -- part: stored.lua
  result = value
  if not result then
    result = 0
  elseif not result.err and string.sub(result, 1, 36) == 'lh1 ' .. from then
    -- part: count.lua
    local behind = string.match(result, '^ %d+ %S+()', 37)
    if refused then
      result = refused
    elseif behind and (token <= now or token < micros) then
      local left = redis.pcall('PTTL', key)
      if type(left) ~= 'number' then
        result = left
      else
        local asked = tonumber(ttl)
        if asked and asked > left then left = asked end
        -- A key that has no ttl, or expires at this moment, gets the shortest ttl.
        if left < 1 then left = 1 end
        -- The counter is written first, so no key is adopted under a token beyond the counter.
        local set = redis.pcall('ZADD', counter, micros, 't')
        if type(set) == 'number' then
          used = micros
          local mark = string.match(result, ' %+$', behind) or ''
          set = redis.pcall('SET', key, 'lh1 ' .. lease .. ' ' .. micros .. ' ' .. holder .. mark, 'PX', left)
        end
        result = set.err and set or { left, micros }
      end
    end
  end
  if result == 0 or type(result) == 'string' then
    -- part: primary.lua
  end
  if results then results[i] = result end
end
return results or result
