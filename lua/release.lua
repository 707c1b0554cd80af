-- Purpose: let go of each lock key that its owner still holds: grant it to whoever waits first in its
--   value, or delete it. A lease that still waits itself is taken out of the line. All others stay.
-- KEYS: [1] fence counter, [2 .. n+1] lock keys
-- ARGV: for each lock key: lease id: with `!` and a holder behind it, it is let go by the will of that
--   one, and its owner is told.
-- Returns: for one lock key its result, for several an array of them, or 1: all were let go. A result
--   is 1: let go; 0: not there; a string: not this owner's, what stands there; an error: refused.
local counter, n = KEYS[1], #KEYS - 1

-- The µs part of a fencing token, as lua/acquire.lua makes it; nothing if it cannot be made.
local function next_micros()
  local last = redis.pcall('GET', counter)
  if last and (last.err or #last ~= 16 or string.find(last, '%D') or last > '9007199254000000') then
    return nil
  end
  local time = redis.call('TIME')
  local micros = string.format('%010d%06d', time[1], time[2])
  if last and last >= micros then micros = string.format('%.0f', last + 1) end
  return redis.pcall('SET', counter, micros).ok and micros
end

-- Grants the key to the first of the line who can be told, or may be polling; true if there is one.
local function pass_on(key, value, at)
  local micros = next_micros()
  while at and micros do
    local lease, ttl, holder, behind = string.match(value, '^ (%x+),(%d+),(%S+)()', at)
    if not lease then return false end
    local channel, polls = 'leasehold/' .. holder, ttl == '0'
    -- Asked for by itself: PUBLISH counts those, too, who listen to everything.
    local listening = polls or redis.pcall('PUBSUB', 'NUMSUB', channel)[2]
    if listening ~= 0 then
      local granted = 'lh1 ' .. lease .. ' ' .. micros .. ' ' .. holder .. string.sub(value, behind)
      local set = redis.pcall('SET', key, granted, 'PX', polls and 100 or ttl)
      if set.err then return false end
      local told = polls or redis.pcall('PUBLISH', channel, lease .. ' ' .. micros .. ' ' .. key)
      -- One that must not be told this way polls in the end.
      if type(told) == 'table' then redis.pcall('PEXPIRE', key, 100) end
      if told ~= 0 then return true end
    end
    -- Nobody listens there: that client has gone.
    at = string.find(value, ' ', behind, true)
  end
  return false
end

local results, result, done = n > 1 and {}, nil, 0
if n >= 8 then
  -- Nearly always most of them are held, and nobody waits: two commands do for all of those. (With few
  -- keys there is little to gain.)
  local values, gone, gone_at = redis.pcall('MGET', unpack(KEYS, 2)), {}, {}
  for i = 1, n do
    local value = values[i]
    local is_held = value and string.find(value, 'lh1 ' .. ARGV[i] .. ' ', 1, true) == 1
    if is_held and not string.find(value, ' ', 55, true) then
      gone[#gone + 1], gone_at[#gone + 1] = KEYS[i + 1], i
    end
  end
  if gone[1] and type(redis.pcall('DEL', unpack(gone))) == 'number' then
    for _, i in ipairs(gone_at) do results[i] = 1 end
  end
end
for i = 1, n do
  local key, lease, by = KEYS[i + 1], ARGV[i], nil
  if string.sub(lease, 33, 33) == '!' then
    lease, by = string.sub(lease, 1, 32), string.sub(lease, 33)
  end
  -- 1 if it has gone already.
  result = results and results[i] or redis.pcall('GET', key)
  if not result then
    result = 0
  elseif result ~= 1 and not result.err then
    if string.sub(result, 1, 36) == 'lh1 ' .. lease then
      if by then
        local channel = 'leasehold/' .. (string.match(result, '^%S+', 55) or '')
        redis.pcall('PUBLISH', channel, lease .. ' ' .. by .. ' ' .. key)
      end
      local line = string.find(result, ' ', 55, true)
      result = line and pass_on(key, result, line) and 1 or redis.pcall('DEL', key)
    else
      local first = string.find(result, ' ' .. lease .. ',', 55, true)
      if first and string.sub(result, 1, 4) == 'lh1 ' then
        local behind = string.find(result, ' ', first + 1, true) or #result + 1
        local rest = string.sub(result, 1, first - 1) .. string.sub(result, behind)
        local set = redis.pcall('SET', key, rest, 'KEEPTTL')
        result = set.err and set or 1
      else
        result = string.sub(result, 1, 256)
      end
    end
  end
  if results then results[i] = result end
  if result == 1 then done = done + 1 end
end
return done < n and results or result
