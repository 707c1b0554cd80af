-- Purpose: grant each free lock to its caller with a fencing token, or say for how long it is taken.
--   A token's upper part is the clock of Redis in µs, made strictly increasing by one counter.
--   A value of our own format without a ttl (an old client's crash) is given one, so that it heals.
--   A caller that has to wait may join the key's queue, which lua/serve.lua describes. ` +` at the end of
--   a lock's value tells its release to serve the queue. Each request of a waiter has the queue expire ten
--   seconds after the lock at the earliest; a request that finds the key free serves the queue first.
--   Each key stands alone: one that cannot be used never costs the others their answer.
-- KEYS: [1] fence counter, [2 .. n+1] lock keys, then the queue of each that is asked for with a queue mode
-- ARGV: [1] holder, then for each lock key: lease id, ttl in ms, and its queue mode: empty: it does not wait;
--   `-`: it may be in the queue already, and does not join; `-+`: the same, and if it polls there it is told
--   from now on; `0`: it joins, and polls; `+`: it joins, and is
--   told of its grant, which then has the ttl; `0` or `+` and µs: the same, at the place of that time.
-- Returns: for one lock key its result, for several an array of them, or if all were granted the first
--   one's, from which the others count up. A result is a string: granted, the µs part of its fencing
--   token; a number: contended, ms until it expires; an array: queued, ms until it expires, the number of
--   waiters before it, and the µs of its place; an error: FOREIGN, what stands there is no lock of ours;
--   any other error: refused.
local counter, holder, n = KEYS[1], ARGV[1], (#ARGV - 1) / 3
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
local results, result, used, head, tail = n > 1 and {}, nil, nil, nil, nil
local granted, behind = 0, n + 1

local function join_or_confirm(key, lease, ttl, mode, queue)
  local waits = string.sub(mode, 1, 1) == '-'
  local held = redis.pcall('GET', key)
  if held and held.err then return { err = 'FOREIGN ' .. held.err } end
  if held and string.sub(held, 1, 4) ~= 'lh1 ' then
    return { err = 'FOREIGN ' .. string.gsub(string.sub(held, 1, 64), '[^ -~]', '?') }
  end
  if held and string.sub(held, 5, 36) == lease then
    -- It was granted while it was queued.
    local kept = redis.pcall('PEXPIRE', key, ttl)
    return kept == 1 and string.sub(held, 38, 53) or kept
  end
  local left = held and redis.pcall('PTTL', key) or 0
  if left == -1 then
    local healed = redis.pcall('PEXPIRE', key, ttl)
    left = healed == 1 and tonumber(ttl) or healed
  end
  if mode == '' or type(left) ~= 'number' then return left end

  local entry, place = lease .. ',' .. (string.sub(mode, 1, 1) == '0' and 0 or ttl) .. ',' .. holder, nil
  if waits then
    place = redis.pcall('ZSCORE', queue, entry)
    if not place then
      local polls = lease .. ',0,' .. holder
      place = redis.pcall('ZSCORE', queue, polls)
      local is_told = place and mode == '-+' and redis.pcall('ZADD', queue, place, entry) == 1
      if is_told then redis.pcall('ZREM', queue, polls) else entry = polls end
    end
    if type(place) ~= 'string' then return left end
  else
    place = string.sub(mode, 2)
    if place == '' then
      local newest = redis.pcall('ZREVRANGE', queue, 0, 0, 'WITHSCORES')[2]
      place = micros
      if newest and tonumber(newest) >= tonumber(micros) then
        place = string.format('%.0f', newest + 1)
      end
    end
  end
  -- The mark tells the holder's release of the queue. A lock acquired past the queue has none yet.
  local is_marked = not held or string.find(held, ' ', 55, true)
    or type(redis.pcall('APPEND', key, ' +')) == 'number'
  local added = waits and 0 or is_marked and redis.pcall('ZADD', queue, place, entry)
  if type(added) ~= 'number' then
    local is_replica = added and string.find(added.err, 'READONLY', 1, true)
    return is_replica and added or left
  end
  local in_queue = true
  if not held then
    -- part: serve.lua
    local written = redis.pcall('SET', counter, micros)
    local served = written.err and written or serve(key, queue, micros, lease, ttl)
    if type(served) == 'string' then used = micros end
    if served == lease then return micros end
    -- A queue that cannot be served does not keep the key from its caller.
    in_queue = type(served) ~= 'table'
    left = in_queue and served and redis.pcall('PTTL', key) or 0
  end
  local ahead = in_queue and redis.pcall('ZRANK', queue, entry)
  -- A queue without a bound could fill the memory of Redis.
  if type(ahead) == 'number' and ahead < 10000 and type(left) == 'number' then
    local lives = redis.pcall('PTTL', queue)
    local longer = type(lives) == 'number' and math.max(lives, left + 10000)
    local kept = longer and redis.pcall('PEXPIRE', queue, longer)
    if kept == 1 then return { left, ahead, tonumber(place) } end
    -- A replica may be behind its primary, where it may still be queued.
    if type(kept) == 'table' and string.find(kept.err, 'READONLY', 1, true) then return kept end
  end
  redis.pcall('ZREM', queue, entry)
  return left
end

for i = 1, n do
  local key, lease, ttl, mode = KEYS[i + 1], ARGV[3 * i - 1], ARGV[3 * i], ARGV[3 * i + 1]
  local queue = nil
  if mode ~= '' then
    behind = behind + 1
    queue = KEYS[behind]
  end
  result = refused
  if not refused then
    if used then
      -- Counted on in the last six digits: to print the whole number takes a µs.
      head, tail = head or string.sub(used, 1, 10), (tail or tonumber(string.sub(used, 11))) + 1
      micros = tail < 1000000 and head .. string.format('%06d', tail) or string.format('%.0f', used + 1)
    end
    local value = 'lh1 ' .. lease .. ' ' .. micros .. ' ' .. holder
    -- A request for what is queued already acquires no free key: its caller may be gone, and nobody would
    -- release it. Where others are queued, they come first.
    local is_queued = queue and (string.sub(mode, 1, 1) == '-' or redis.pcall('EXISTS', queue) == 1)
    result = not is_queued and redis.pcall('SET', key, value, 'NX', 'PX', ttl)
    if not result then
      result = join_or_confirm(key, lease, ttl, mode, queue)
      -- The key is free, and its queue cannot be used: it may hold something else.
      if result == 0 and queue and string.sub(mode, 1, 1) ~= '-' then
        result = redis.pcall('SET', key, value, 'NX', 'PX', ttl) or 0
      end
    end
    if type(result) == 'table' and result.ok then
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
