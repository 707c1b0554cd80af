-- Purpose: grant each free lock to its caller with a fencing token, or say for how long it is taken.
--   A token's upper part is the clock of Redis in µs, made strictly increasing by one counter.
--   A value of our own format without a ttl (an old client's crash) is given one, so that it heals.
--   Who has to wait may stand in line at the end of the value; lua/release.lua serves the line.
--   Each key stands alone: one that cannot be used never costs the others their answer.
-- KEYS: [1] fence counter, [2 .. n+1] lock keys
-- ARGV: [1] holder, then for each lock key: lease id, ttl in ms, and how it stands in line: empty: not
--   at all; `-`: where it may stand already; 0: it polls; otherwise it can be told, and this is the
--   ttl in ms that it then gets.
-- Returns: for one lock key its result, for several an array of them, or if all were granted the first
--   one's, from which the others count up. A result is a string: granted, the µs part of its fencing
--   token; a number: contended, ms until it expires, or if it stands in line -1 less that; an error:
--   FOREIGN, what stands there is no lock of ours; any other error: refused.
local counter, holder, n = KEYS[1], ARGV[1], #KEYS - 1
local last, refused = redis.pcall('GET', counter), nil
-- Near 2^53 a double could not tell one number from the next.
if last and (last.err or #last ~= 16 or string.find(last, '%D') or last > '9007199254000000') then
  refused = last
  if not last.err or string.sub(last.err, 1, 9) == 'WRONGTYPE' then
    refused = { err = 'ERR the fence counter ' .. counter .. ' does not hold a time in µs' }
  end
end
-- Sixteen digits until the year 2286: as text they sort like the numbers they are.
local time = redis.call('TIME')
local micros = string.format('%010d%06d', time[1], time[2])
if last and not refused and last >= micros then
  micros = string.format('%.0f', last + 1)
end

local function occupied(key, lease, ttl, stands)
  local held = redis.pcall('GET', key)
  if not held then return 0 end
  if held.err then return { err = 'FOREIGN ' .. held.err } end
  if string.sub(held, 1, 4) ~= 'lh1 ' then
    return { err = 'FOREIGN ' .. string.gsub(string.sub(held, 1, 64), '[^ -~]', '?') }
  end
  if string.sub(held, 5, 36) == lease then
    -- Its turn came while it stood in line.
    local kept = redis.pcall('PEXPIRE', key, ttl)
    return kept == 1 and string.sub(held, 38, 53) or kept
  end
  local left = redis.pcall('PTTL', key)
  if left == -1 then
    local healed = redis.pcall('PEXPIRE', key, ttl)
    left = healed == 1 and tonumber(ttl) or healed
  end
  if stands == '' or type(left) ~= 'number' then return left end
  if not string.find(held, lease, 55, true) then
    -- A lease that comes into line twice could be granted late, to nobody. A line without bounds
    -- would fill the memory of Redis.
    if stands == '-' or #held > 8192 then return left end
    local stood = redis.pcall('APPEND', key, ' ' .. lease .. ',' .. stands .. ',' .. holder)
    if type(stood) ~= 'number' then return left end
  end
  return -1 - left
end

local results, result, used, head, tail = n > 1 and {}, nil, nil, nil, nil
local granted = 0
for i = 1, n do
  local key, lease, ttl, stands = KEYS[i + 1], ARGV[3 * i - 1], ARGV[3 * i], ARGV[3 * i + 1]
  result = refused
  if not refused then
    if used then
      -- Counted on in the last six digits: to print the whole number takes a µs.
      head, tail = head or string.sub(used, 1, 10), (tail or tonumber(string.sub(used, 11))) + 1
      micros = tail < 1000000 and head .. string.format('%06d', tail) or string.format('%.0f', used + 1)
    end
    local value = 'lh1 ' .. lease .. ' ' .. micros .. ' ' .. holder
    -- Who asks again takes no free key: should it have given up meanwhile, nobody would let go of it.
    result = stands ~= '-' and redis.pcall('SET', key, value, 'NX', 'PX', ttl)
    if not result then
      result = occupied(key, lease, ttl, stands)
    elseif result.ok then
      result, used, granted = micros, micros, granted + 1
    end
  end
  if results then results[i] = result end
end

local written = used and redis.pcall('SET', counter, used)
if written and written.err then
  -- A counter that cannot be written grants nothing.
  for i = 1, n do
    if type(results and results[i] or result) == 'string' then
      redis.pcall('DEL', KEYS[i + 1])
      if results then results[i] = written else result = written end
    end
  end
  granted = 0
end
return results and (granted == n and results[1] or results) or result
