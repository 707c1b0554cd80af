-- Purpose: grant each free lock to its caller with a fencing token, or say for how long it is taken.
--   A token's upper part is the clock of Redis in µs, made strictly increasing by one counter.
--   A value of our own format without a ttl (an old client's crash) is given one, so that it heals.
--   Each key stands alone: one that cannot be used never costs the others their answer.
-- KEYS: [1] fence counter, [2 .. n+1] lock keys
-- ARGV: [1] holder, then for each lock key: lease id, ttl in ms
-- Returns: for each lock key two values, code and detail:
--   1 granted, µs part of its fencing token | 0 contended, ms until it expires
--   3 not a lock of ours, what stands there | 4 refused, the server's error
local counter, holder = KEYS[1], ARGV[1]
local out, used, code, detail = {}, nil, nil, nil
local last = redis.pcall('GET', counter)
local refused = last and last.err
if last and not refused and not (#last == 16 and tonumber(last)) then
  refused = 'ERR the fence counter ' .. counter .. ' does not hold a time in µs'
end
-- Sixteen digits until the year 2286: as text they sort like the numbers they are.
local time = redis.call('TIME')
local micros = time[1] .. string.format('%06d', time[2])
if last and not refused and last >= micros then
  micros = string.format('%.0f', last + 1)
end

for i = 1, #KEYS - 1 do
  local key, lease, ttl = KEYS[i + 1], ARGV[2 * i], ARGV[2 * i + 1]
  code, detail = 4, refused
  if not refused then
    if used then micros = string.format('%.0f', used + 1) end
    local value = 'lh1 ' .. lease .. ' ' .. micros .. ' ' .. holder
    local set = redis.pcall('SET', key, value, 'NX', 'PX', ttl)
    if set and set.ok then
      code, detail, used = 1, micros, micros
    elseif set then
      code, detail = 4, set.err
    else
      local held = redis.pcall('GET', key)
      if held.err then
        code, detail = 3, held.err
      elseif string.sub(held, 1, 4) ~= 'lh1 ' then
        code, detail = 3, string.sub(held, 1, 64)
      else
        code, detail = 0, redis.call('PTTL', key)
        if detail == -1 then
          detail = tonumber(ttl)
          redis.call('PEXPIRE', key, detail)
        end
      end
    end
  end
  if #KEYS > 2 then out[2 * i - 1], out[2 * i] = code, detail end
end

local written = used and redis.pcall('SET', counter, used)
if #KEYS == 2 then out = { code, detail } end
if written and written.err then
  -- A counter that cannot be written grants nothing.
  for i = 1, #KEYS - 1 do
    if out[2 * i - 1] == 1 then
      redis.call('DEL', KEYS[i + 1])
      out[2 * i - 1], out[2 * i] = 4, written.err
    end
  end
end
return out
