-- Purpose: grant each lock key to its lease, provided that the key is free, its queue is empty, and the fenced value of
--   the same name is missing or deleted. Otherwise return the lock and the value. The value is the record of a run, so a
--   run with a record does not begin again.
-- KEYS: [1] fence counter, [2 .. n+1] lock keys, [n+2 .. 2n+1] their queues, [2n+2 .. 3n+1] value keys
-- ARGV: [1] holder, [2] the longest value that the caller accepts, in bytes, then for each lock key: lease id, ttl in ms
-- Returns: for one lock key its result, for several keys an array of results. A result is a string: granted, the µs
--   part of the fencing token; an array: not granted, the ttl of the lock in ms (-1: none, -2: the lock is free), the
--   lock's value or '', the token of the fenced value or '', and the bytes of the fenced value or nil; an error FOREIGN
--   (lua/foreign.lua): the key holds no lock of this library; an error FOREIGNVALUE and a type: the value key holds no
--   fenced value of this library; an error TOOLARGE: the value is longer than accepted; any other error: refused.
local counter, holder, longest, n = KEYS[1], ARGV[1], tonumber(ARGV[2]), math.floor((#KEYS - 1) / 3)
local time = redis.call('TIME')
local now = string.format('%010d%06d', time[1], time[2])
local results, result, micros, used, head, tail, refused = n > 1 and {}, nil, nil, nil, nil, nil, nil
-- part: shares.lua

-- Returns the token and the bytes of a fenced value, '' and false if the value is missing, or an error.
local function read(key)
  -- part: token.lua
  if type(seen) == 'table' then
    return { err = string.gsub(seen.err, '^FOREIGN ', 'FOREIGNVALUE ') }
  end
  if seen == 0 then return { '', false } end
  -- part: bytes.lua
  if type(bytes) == 'table' then return bytes end
  return { seen, bytes }
end

for i = 1, n do
  local key, queue, lease, ttl = KEYS[i + 1], KEYS[n + i + 1], ARGV[2 * i + 1], ARGV[2 * i + 2]
  local found = read(KEYS[2 * n + i + 1])
  -- part: stored.lua
  if value and value.err and string.sub(value.err, 1, 9) == 'WRONGTYPE' and not use_shares().look(key) then
    -- Leases have shared the key, and all of them have ended, so the key is free.
    value = false
  end
  -- part: foreign.lua
  if found.err then
    result = found
  elseif value and value.err then
    result = value
  else
    local waiting = not value and not found[2] and redis.pcall('ZCARD', queue)
    if waiting == 0 then
      -- part: count.lua
      local text = 'lh1 ' .. lease .. ' ' .. micros .. ' ' .. holder
      local set = refused or redis.pcall('SET', key, text, 'NX', 'PX', ttl)
      local written = set.ok and redis.pcall('ZADD', counter, micros, 't')
      -- Undo the grant if the counter was not written, since a later grant could get the same token.
      if type(written) == 'table' then redis.pcall('DEL', key) end
      result = type(written) == 'number' and micros or written or set
      if type(written) == 'number' then used = micros end
    else
      local left = value and redis.pcall('PTTL', key) or -2
      if left == -1 then
        local healed = redis.pcall('PEXPIRE', key, ttl)
        left = healed == 1 and tonumber(ttl) or healed
      end
      result = type(left) == 'number' and { left, value or '', found[1], found[2] } or left
    end
  end
  if results then results[i] = result end
end
return results or result
