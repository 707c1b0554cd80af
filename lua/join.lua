-- Purpose: confirm a lease that was granted while it was queued. Otherwise add the lease to the queue, or find its
--   place there. A part of lua/acquire.lua, for a key that is taken or has a queue.
--   If a waiter has not confirmed its grant in time, the next request of another waiter calls the roll
--   (lua/roll_call.lua). The first request of a waiter after the roll call serves the queue.
-- KEYS: those of the script
-- ARGV: those of the script
-- Returns: a result of acquire, which may be an error FOREIGN; 0: the key is free; nil: begin again
local function join_or_confirm(key, lease, ttl, mode, queue, waiting)
  local kind = string.sub(mode, 1, 1)
  local waits = kind == '-'
  -- part: stored.lua
  -- part: foreign.lua
  local held = value
  if held and held.err then return held end
  -- The mark of a grant that its waiter has not confirmed: `?`, or `!` after a roll call.
  local mark_at, _, doubt = string.find(held or '', ' ([?!])', 55)
  if held and string.sub(held, 5, 36) == lease then
    if string.sub(held, 38, 53) == '0000000000000000' then
      -- Plain commands have set the key, but the caller cannot use their token. lua/acquire.lua grants the key again.
      local deleted = redis.pcall('DEL', key)
      return type(deleted) == 'table' and deleted or nil
    end
    -- The lease was granted the key while it was queued.
    local kept
    if doubt then
      kept = redis.pcall('SET', key, string.sub(held, 1, mark_at - 1) .. string.sub(held, mark_at + 2), 'PX', ttl)
      if kept.ok then kept = 1 end
    else
      kept = redis.pcall('PEXPIRE', key, ttl)
    end
    return kept == 1 and string.sub(held, 38, 53) or kept
  end
  local left = held and redis.pcall('PTTL', key) or 0
  if left == -1 then
    local healed = redis.pcall('PEXPIRE', key, ttl)
    left = healed == 1 and tonumber(ttl) or healed
  end
  -- The key expires three seconds after the time for the confirmation has ended.
  local is_over = false
  if doubt and mode ~= '' and type(left) == 'number' then
    is_over = left <= 3000
    left = math.max(left - 3000, 1)
  end
  if not held or is_over then
    -- part: count.lua
    if refused then return refused end
  end
  if mode == '' or type(left) ~= 'number' then return left end

  local entry = lease .. ',' .. (kind == '0' and 0 or ttl) .. ',' .. holder
  local place, ahead, comes_last = nil, nil, false
  if waits then
    place = redis.pcall('ZSCORE', queue, entry)
    if not place then
      local polls = lease .. ',0,' .. holder
      place = redis.pcall('ZSCORE', queue, polls)
      local is_notified = place and mode == '-+' and redis.pcall('ZADD', queue, place, entry) == 1
      if is_notified then redis.pcall('ZREM', queue, polls) else entry = polls end
    end
    -- Places that clients write have at most sixteen digits.
    if type(place) ~= 'string' or #place > 16 or string.find(place, '%D') then return left end
    if tonumber(place) >= 4000000000000000 then
      -- A roll call has made the waiter silent. This request gives the waiter back its own place.
      place = string.format('%.0f', place - 4000000000000000)
      redis.pcall('ZADD', queue, place, entry)
    end
  else
    place = string.sub(mode, 2)
    if place == '' then
      place = now
      -- The clock of Redis may have been set back since others joined.
      comes_last = waiting == 0 or redis.pcall('ZCOUNT', queue, now, 'inf') == 0
      local newest = not comes_last
        and redis.pcall('ZRANGE', queue, '(4000000000000000', now, 'BYSCORE', 'REV', 'LIMIT', 0, 1, 'WITHSCORES')
      if newest and newest[2] then
        if #newest[1] <= 256 then
          place = string.format('%.0f', newest[2] + 1)
        else
          -- Another user has written this entry, since those of clients are shorter. If it stayed, each waiter that
          -- joins would read it.
          redis.pcall('ZREM', queue, newest[1])
        end
      end
    end
  end
  -- The mark makes the holder's release serve the queue. The lock's value has no mark if the lock was acquired while no
  -- waiter was queued, or by a request that does not wait.
  local marked = held and not string.find(held, ' +', 55, true) and redis.pcall('APPEND', key, ' +')
  local refused = type(marked) == 'table' and marked
  if not waits and not refused then
    local added = redis.pcall('ZADD', queue, place, entry)
    refused = type(added) == 'table' and added
    if comes_last and added == 1 then ahead = waiting end
  end
  -- A replica may be behind its primary, where the lease may be queued.
  if refused and string.find(refused.err, 'READONLY', 1, true) then return refused end
  if refused and not waits then return left end
  if is_over and doubt == '?' then
    -- part: roll_call.lua
  end
  if is_over then
    local deleted = redis.pcall('DEL', key)
    if type(deleted) == 'table' then return deleted end
    held = false
  end
  local in_queue = true
  if not held then
    ahead = nil
    -- part: serve.lua
    local written = redis.pcall('ZADD', counter, micros, 't')
    local served = type(written) == 'table' and written or serve(key, queue, micros, lease, ttl)
    if type(served) == 'string' then used = micros end
    if served == lease then return micros end
    -- If the queue cannot be served, lua/acquire.lua grants the free key to the caller.
    in_queue = type(served) ~= 'table'
    left = in_queue and served and redis.pcall('PTTL', key) or 0
  end
  ahead = in_queue and (ahead or redis.pcall('ZRANK', queue, entry))
  -- The queue has a bound, since it could fill the memory of Redis.
  if type(ahead) == 'number' and ahead < 10000 and type(left) == 'number' then
    local lives, kept = redis.pcall('PTTL', queue), 1
    if type(lives) ~= 'number' then
      kept = lives
    elseif waits or lives < left + 10000 then
      -- A request that joins sets the queue's ttl only if the ttl is short. A later request of the lease always sets
      -- it, because a replica then refuses the write.
      kept = redis.pcall('PEXPIRE', queue, math.max(lives, left + 20000))
    end
    if kept == 1 then return { left, ahead, tonumber(place) } end
    -- A replica may be behind its primary, where the lease may still be queued.
    if type(kept) == 'table' and string.find(kept.err, 'READONLY', 1, true) then return kept end
  end
  redis.pcall('ZREM', queue, entry)
  return left
end
