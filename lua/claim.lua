-- Purpose: grant each lock key to its lease, provided that the key is free and its queue is empty. Otherwise return the
--   lock and the fenced value of the same name. The script has three kinds of callers. A `Once` is granted the key only
--   while the value, its record, is missing or deleted. A candidate of an election writes the value with its grant,
--   under the token of the grant. A look is never granted the key; it only reads, and removes shares that have ended.
-- KEYS: [1] fence counter, [2 .. n+1] lock keys, [n+2 .. 2n+1] their queues, [2n+2 .. 3n+1] value keys
-- ARGV: [1] holder, [2] the longest value that the caller accepts, in bytes, then for each lock key: lease id, ttl in
--   ms (0: a look), and `+` and the value that a candidate writes, or '' for other callers
-- Returns: for one lock key its result, for several keys an array of results. A result is a string: granted, the µs
--   part of the fencing token; an array: not granted, the ttl of the lock in ms (-1: none, -2: the lock is free), the
--   lock's value or '', the token of the fenced value or '', and the bytes of the fenced value or nil (always nil for a
--   candidate); an error FOREIGN (lua/foreign.lua): the key holds no lock of this library; an error FOREIGNVALUE and a
--   type: the value key holds no fenced value of this library; an error TOOLARGE: the value is longer than accepted;
--   any other error: refused.
local counter, holder, longest, n = KEYS[1], ARGV[1], tonumber(ARGV[2]), math.floor((#KEYS - 1) / 3)
local time = redis.call('TIME')
local now = string.format('%010d%06d', time[1], time[2])
local results, result, micros, used, head, tail, refused = n > 1 and {}, nil, nil, nil, nil, nil, nil
-- part: shares.lua

-- Returns the token and the bytes of a fenced value, '' and false if the value is missing, or an error. Without
-- `needs_bytes`, returns false in place of the bytes.
local function read(key, needs_bytes)
  -- part: token.lua
  if type(seen) == 'table' then
    return { err = string.gsub(seen.err, '^FOREIGN ', 'FOREIGNVALUE ') }
  end
  if seen == 0 then return { '', false } end
  if not needs_bytes then return { seen, false } end
  -- part: bytes.lua
  if type(bytes) == 'table' then return bytes end
  return { seen, bytes }
end

for i = 1, n do
  local key, queue, value_key = KEYS[i + 1], KEYS[n + i + 1], KEYS[2 * n + i + 1]
  local lease, ttl, term = ARGV[3 * i], ARGV[3 * i + 1], ARGV[3 * i + 2]
  local found = read(value_key, term == '')
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
    local waiting = ttl ~= '0' and not value and not found[2] and redis.pcall('ZCARD', queue)
    local token = nil
    if waiting == 0 then
      -- part: count.lua
      if term ~= '' then
        -- A token is the µs times 1,024. Numbers in Lua cannot hold all of its digits, so the script multiplies the
        -- upper and the lower digits separately.
        local low = string.sub(micros, 9) * 1024
        local carry = math.floor(low / 100000000)
        token = string.format('%012.0f%08.0f', string.sub(micros, 1, 8) * 1024 + carry, low - carry * 100000000)
      end
    end
    -- A value with a greater token refuses the write: the fence counter was deleted, and the clock was set back.
    if waiting == 0 and not (token and found[1] > token) then
      local text = 'lh1 ' .. lease .. ' ' .. micros .. ' ' .. holder
      local set = refused or redis.pcall('SET', key, text, 'NX', 'PX', ttl)
      local written = set.ok and redis.pcall('ZADD', counter, micros, 't')
      if type(written) == 'number' then
        used = micros
        if token then written = redis.pcall('HSET', value_key, 'token', token, 'value', string.sub(term, 2)) end
      end
      -- Undo the grant if the counter was not written, since a later grant could get the same token, or if the value
      -- of a candidate was not written.
      if type(written) == 'table' then redis.pcall('DEL', key) end
      result = type(written) == 'number' and micros or written or set
    else
      local left = value and redis.pcall('PTTL', key) or -2
      if left == -1 and ttl ~= '0' then
        local healed = redis.pcall('PEXPIRE', key, ttl)
        left = healed == 1 and tonumber(ttl) or healed
      end
      result = type(left) == 'number' and { left, value or '', found[1], found[2] } or left
    end
  end
  if results then results[i] = result end
end
return results or result
