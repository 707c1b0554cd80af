-- Purpose: confirm a lease that was granted while it was queued. Otherwise add the lease to the queue, or find its
--   place there. A part of lua/acquire.lua, for a key that is taken or has a queue.
--   If a waiter has not confirmed its grant in time, the next request of another waiter calls the roll
--   (lua/roll_call.lua). The first request of a waiter after the roll call serves the queue. For a share, a release
--   calls the roll, too.
-- KEYS: those of the script
-- ARGV: those of the script
-- Returns: a result of lua/acquire.lua, which may be an error FOREIGN or MIXED; 0: the key is free; nil:
--   lua/acquire.lua has to begin again
local function join_or_confirm(key, lease, ttl, mode, asked, queue, waiting)
  local kind = string.sub(mode, 1, 1)
  local waits = kind == '-'
  local share, held, set = nil, false, nil
  if asked ~= '' then share = use_shares().share_of(asked) end
  if share == false then return { err = 'ERR no mode: ' .. asked } end
  -- The type of the key decides how to read it. A request begins with the type that its own lease would have.
  local keeps_late = (mode ~= '' or share) and waiting ~= 0
  if share then set = known or shares.look(key, keeps_late) end
  if not share or set and set.err then
    -- part: stored.lua
    if not share and value and value.err and string.sub(value.err, 1, 9) == 'WRONGTYPE' then
      set = use_shares().look(key, keeps_late)
      -- All shares have ended, so the key is free: lua/acquire.lua grants it.
      if not set then return nil end
      if not set.err then value = false end
    end
    if set and set.err then
      if string.sub(set.err, 1, 9) ~= 'WRONGTYPE' and set.err ~= 'FOREIGN zset' then return set end
      set = nil
    end
    -- part: foreign.lua
    held = value
    if held and held.err then return held end
  end
  -- The mark of a grant that its waiter has not confirmed: `?`, or `!` after a roll call.
  local mark_at, _, doubt = string.find(held or '', ' ([?!])', 55)
  if held and not share and string.sub(held, 5, 36) == lease then
    if string.sub(held, 38, 53) == '0000000000000000' then
      -- Plain commands have set the key, without a token that the caller can use. lua/acquire.lua grants the key again.
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
  local grant
  if share then
    grant = function()
      -- part: count.lua
      if refused then return refused end
      local given = redis.pcall('ZADD', counter, micros, 't')
      if type(given) == 'number' then given = shares.give(key, share, lease, holder, ttl, set) end
      if given.err then return given end
      used = micros
      return micros
    end
  end
  -- The result of a request that is not queued.
  local function unqueued(left)
    if share and left == 0 and mode ~= '' and not waits then return grant() end
    return set and type(left) == 'number' and { left, set.limit } or left
  end
  local left = held and redis.pcall('PTTL', key) or 0
  if set then
    if share and share.kind ~= set.kind then return { err = 'MIXED readers and permits' } end
    if share and waits and redis.pcall('ZSCORE', key, shares.members_of(share, lease, holder)[1]) then return grant() end
    left = shares.wait_for(key, share, set)
  end
  if share and not held and not waits and (left == 0 or not left) and (waiting == 0 or type(waiting) == 'table') then
    return grant()
  end
  if set then left = left or math.max(set.ends - shares.now_ms, 0) + 1 end
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
  if mode == '' or type(left) ~= 'number' then return unqueued(left) end

  local entry = lease .. ',' .. (kind == '0' and 0 or ttl) .. asked .. ',' .. holder
  local place, ahead, comes_last = nil, nil, false
  if waits then
    place = redis.pcall('ZSCORE', queue, entry)
    if not place then
      local polls = lease .. ',0' .. asked .. ',' .. holder
      place = redis.pcall('ZSCORE', queue, polls)
      local is_notified = place and mode == '-+' and redis.pcall('ZADD', queue, place, entry) == 1
      if is_notified then redis.pcall('ZREM', queue, polls) else entry = polls end
    end
    -- Places that clients write have at most sixteen digits.
    if type(place) ~= 'string' or #place > 16 or string.find(place, '%D') then return unqueued(left) end
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
  if refused and not waits then return unqueued(left) end
  local in_queue = true
  if is_over or not held then
    -- part: serve.lua
    if is_over and doubt == '?' or set and set.late then
      -- Several shares may be late. An earlier roll call that has not ended counts for all of them.
      local is_called, ends = false, set and shares.roll_call_end(key)
      if not ends then
        -- part: roll_call.lua
      end
      if set then
        set = shares.end_late(key, set, is_called, ends)
      elseif is_called then
        local called = redis.pcall('SET', key, string.sub(held, 1, mark_at) .. '! +', 'PX', 3500)
        if called.ok then left, ahead, is_over = 500, nil, false end
      end
    end
    if is_over then
      local deleted = redis.pcall('DEL', key)
      if type(deleted) == 'table' then return deleted end
      held = false
    end
    if not held then
      ahead = nil
      local written = not set and redis.pcall('ZADD', counter, micros, 't')
      local served, last, own = written, nil, nil
      if type(written) ~= 'table' then served, last, own, set = serve(key, queue, micros, set, lease, ttl) end
      -- The next key of this call counts on from here.
      if last then used, head, tail = last, nil, nil end
      if own then return own end
      -- If the queue cannot be served, lua/acquire.lua grants the free key to the caller.
      in_queue = type(served) ~= 'table'
      if served or not set or set.late or set.called then
        left = in_queue and served and not set and redis.pcall('PTTL', key) or 0
        if set then
          local ends = set.called or set.ends
          left = shares.wait_for(key, share, set) or math.max(ends - shares.now_ms, 0) + 1
        end
      end
    end
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
    if kept == 1 then return { left, ahead, tonumber(place), set and set.limit } end
    -- A replica may be behind its primary, where the lease may still be queued.
    if type(kept) == 'table' and string.find(kept.err, 'READONLY', 1, true) then return kept end
  end
  redis.pcall('ZREM', queue, entry)
  return unqueued(left)
end
