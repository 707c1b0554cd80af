-- Purpose: grant each free lock key to its lease in the form of Redisson's locks, or return for how long the key is
--   taken. A key with a value of any other type is taken, too. Clients of `OtherLibrary::Redisson` call this script in
--   place of lua/acquire.lua.
--   A lock is a hash with one field, `<lease id>:<holder>`. Redisson takes a hash without a ttl for a lock of its own
--   caller. So the script sets the ttl together with the hash, after a trial that shows whether the user may set it.
--   An error of one key does not change the results of the other keys.
-- KEYS: [1 .. n] lock keys, [n+1 .. 2n] the counter of each lock key: Redisson's counter of tokens for fenced locks,
--   otherwise the fence counter
-- ARGV: [1] `fenced`, or empty; then for each lock key: field, ttl in ms
-- Returns: for one lock key its result, for several keys an array of results. A result is a string: granted, `=` and
--   the number of Redisson's counter for fenced locks, otherwise the µs part of the fencing token; a number: a lease of
--   this library holds the key, ms until it expires (-1: never); an error FOREIGN, a type, these ms and a mark: a lock
--   of Redisson, or a value of another program; any other error: refused.
local n, is_fenced = #KEYS / 2, ARGV[1] == 'fenced'
local results, result, now = n > 1 and {}, nil, nil
if not is_fenced then
  local time = redis.call('TIME')
  now = string.format('%010d%06d', time[1], time[2])
end
for i = 1, n do
  local key, counter = KEYS[i], KEYS[n + i]
  local field, ttl = ARGV[2 * i], ARGV[2 * i + 1]
  result = redis.pcall('EXISTS', key)
  if result == 1 and redis.pcall('HEXISTS', key, field) ~= 1 then
    -- part: redisson_primary.lua
    if result == 1 then
      -- part: redisson_holder.lua
    end
  elseif type(result) == 'number' then
    local token = redis.pcall('PEXPIRE', key, ttl)
    if type(token) == 'number' and is_fenced then
      token = redis.pcall('INCR', counter)
      -- A Lua number does not hold all digits of a great counter.
      if type(token) == 'number' then token = redis.pcall('GET', counter) end
      if type(token) == 'string' then token = '=' .. token end
      local said = token.err or token
      if string.find(said, '^=[0-]') or string.find(said, '^WRONGTYPE') or string.find(said, '^ERR [vi]') then
        -- The value is 0 or negative, has another type, is no number, or is the greatest number.
        local found = redis.pcall('TYPE', counter).ok or 'value'
        token = { err = 'ERR the counter ' .. counter .. ' has no next number: it is a ' .. found }
      end
    elseif type(token) == 'number' then
      local micros, refused, used, head, tail = nil, nil, nil, nil, nil
      -- part: count.lua
      token = refused or redis.pcall('ZADD', counter, micros, 't')
      if type(token) == 'number' then token = micros end
    end
    result = token
    if type(token) == 'string' then
      result = redis.pcall('HSET', key, field, '1')
      if type(result) == 'number' then result = redis.pcall('PEXPIRE', key, ttl) end
      if type(result) == 'number' then result = token end
    end
  end
  if results then results[i] = result end
end
return results or result
