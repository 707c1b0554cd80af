-- Purpose: release each lock key that its lease still holds: grant the key to the first waiter of its queue, as
--   lua/serve.lua describes, or delete it. If the lease is queued, remove it from the queue.
-- KEYS: [1] fence counter, [2 .. n+1] lock keys, [n+2 .. 2n+1] their queues, [2n+2] on a node of a quorum, its mark
-- ARGV: for each lock key: lease id: it has one of these forms:
--   `lh1 <lease id> <µs> <holder>`: a release of a lease that was granted. `<µs>` is the µs part of its token, or
--   sixteen zeros if plain commands granted it. The argument is the whole value of the lease's key, unless waiters are
--   queued: the value then also has a mark;
--   `<lease id>`: a release of a lease that may have been granted;
--   `<lease id>!<holder>`: the client `<holder>` takes the key by force, and the script notifies the lease's holder;
--   `<lease id>?<holder>`: the same, but not while the grant is less than a second old and the lease's holder does not
--   listen;
--   `<lease id>,<ttl in ms><mode>,<holder>`: a release of a lease that may be queued with this ttl. The mode is that of
--   its acquire, empty for an exclusive lease;
--   `keep <µs> <ms> ` and a lease id, or the first member of a share (lua/shares.lua): a release of a lease that was
--   granted at `<µs>`. The key, or the permits, stay taken until `<ms>` after the grant.
--   A forced release of a share ends with a space and the first member of the share.
--   Last, on a Cluster: the start of the server's shard channels, to which the script appends a holder. On a node of a
--   quorum: length of a quarantine in ms.
-- Returns: for one lock key its result, for several keys an array of results, or 1: all were released. A result is 1:
--   released; 0: the key is missing; 2: not released, since the lease's holder does not listen yet; a string, the key's
--   value: another lease holds the key; an error QUARANTINE and ms: the lease does not hold the key, and the node of a
--   quorum may have lost the lease; an error FOREIGN and a type: the key holds no shares of this library; any other
--   error: refused.
local counter, n = KEYS[1], math.floor((#KEYS - 1) / 2)

-- The usual case comes first: the key's value is equal to the argument, so no waiter is queued.
if n == 1 and string.sub(ARGV[1], 1, 4) == 'lh1 ' then
  if redis.pcall('GETRANGE', KEYS[2], '0', '255') == ARGV[1] then return redis.pcall('DEL', KEYS[2]) end
end
local mark, quarantine = KEYS[2 * n + 2], tonumber(ARGV[n + 1])
local shard = not mark and ARGV[n + 1]
local results, result, done = n > 1 and {}, nil, 0
if n > 1 then
  local values, gone, gone_at = redis.pcall('MGET', unpack(KEYS, 2, n + 1)), {}, {}
  for i = 1, n do
    if values[i] == ARGV[i] and string.sub(ARGV[i], 1, 4) == 'lh1 ' then
      gone[#gone + 1], gone_at[#gone + 1] = KEYS[i + 1], i
    end
  end
  if gone[1] and type(redis.pcall('DEL', unpack(gone))) == 'number' then
    if #gone == n then return 1 end
    for _, i in ipairs(gone_at) do results[i] = 1 end
  end
end
local time = redis.call('TIME')
-- As in lua/acquire.lua.
local now = time[1] .. time[2]
if #now ~= 16 then now = string.format('%010d%06d', time[1], time[2]) end
for i = 1, n do
  local key, queue, lease, after = KEYS[i + 1], KEYS[n + 1 + i], ARGV[i], nil
  local ttl, mode, own, member, since, kept, waiting = nil, '', nil, nil, nil, nil, nil
  -- The loop above has set the result to 1 if it deleted the key.
  result = results and results[i]
  if not result and string.find(lease, '^keep 0 0 ') then
    -- part: release_share.lua
  end
  if not result then
    if string.sub(lease, 1, 5) == 'keep ' then
      since, kept, lease = string.match(lease, '^keep (%d+) (%d+) (.+)$')
      if #lease > 32 then member = lease end
    end
    if string.sub(lease, 1, 4) == 'lh1 ' then lease = string.sub(lease, 5, 36) end
    if #lease > 32 and string.find(lease, '^[!?,]', 33) then
      lease, after = string.sub(lease, 1, 32), string.sub(lease, 33)
      if string.sub(after, 1, 1) == ',' then
        ttl, mode, own = string.match(after, '^,(%d*)([rp]?[%d/]*),(.*)$')
        -- An argument of another form matches no entry of a queue, so its mode has no effect.
        mode, after = mode or '', nil
      else
        member = string.match(after, ' (.+)$')
      end
    end
    local is_share = member or mode ~= ''
    if not is_share then
      -- part: stored.lua
      result = value
      -- An exclusive lease may leave the queue of a key with shares.
      is_share = ttl and result and result.err and string.sub(result.err, 1, 9) == 'WRONGTYPE'
    end
    -- part: shares.lua
    -- The shares of the key, and the members of the lease if it has a share.
    local is_held, set, share, members, holder = false, nil, nil, nil, own
    if is_share then
      if member then
        local _
        share, _, holder = use_shares().share_in(member)
      else
        share = use_shares().share_of(mode)
      end
      set, result = shares.look(key, waiting ~= 0), 0
      if set and set.late then
        local entry, is_called, ends = ARGV[i], false, shares.roll_call_end(key)
        if not ends then
          -- part: hint.lua
          -- part: roll_call.lua
        end
        set = shares.end_late(key, set, is_called, ends)
      end
      if set and set.err then
        result, set = set, nil
        if string.sub(result.err, 1, 9) == 'WRONGTYPE' then
          -- part: stored.lua
          result = value or 0
        end
      end
      members = set and share and shares.members_of(share, lease, holder)
      is_held = members and redis.pcall('ZSCORE', key, members[1])
    else
      is_held = type(result) == 'string' and string.sub(result, 1, 36) == 'lh1 ' .. lease
    end
    if is_held or ttl then
      -- part: serve.lua
      local too_early, is_freed, serves, rest = false, false, false, 0
      if is_held and after then
        if not members then holder = string.match(result, '^%S+', 55) or '' end
        -- part: channel.lua
        if string.sub(after, 1, 1) == '?' then
          -- part: listeners.lua
          -- Shares and grants by plain commands do not store their time, so they count as new.
          local granted = members and 0 or tonumber(string.sub(result, 38, 53))
          too_early = listeners == 0 and (granted == 0 or granted and now - granted < 1000000)
        end
        if not too_early then
          local message = string.sub(lease, 1, 16) .. ' !' .. string.match(after, '^.(%S*)') .. ' ' .. key
          -- part: publish.lua
        end
      end
      if since then rest = math.max(math.min(kept, math.ceil(since / 1000) + kept - string.sub(now, 1, 13)), 0) end
      if not is_held then
        local left, gone = redis.pcall('ZREM', queue, ARGV[i], lease .. ',0' .. mode .. ',' .. own), 1
        if type(left) == 'table' then
          result = left
        elseif left > 0 then
          -- part: near.lua
          result, serves = 1, set
        end
      elseif too_early then
        result = 2
      elseif members then
        local changed
        if rest > 0 then
          local resting = shares.members_of(share, lease, holder, shares.now_ms + rest)
          changed = redis.pcall('ZADD', key, 'XX', unpack(resting))
        else
          changed = redis.pcall('ZREM', key, unpack(members))
          if type(changed) == 'number' then set.used = set.used - changed end
        end
        local refused = type(changed) == 'table' and changed or set.used > 0 and shares.look_at_newest(key, set)
        if set.used > 0 and not refused then redis.pcall('PEXPIREAT', key, set.ends + 1000) end
        if set.used == 0 then set = nil end
        result, serves = refused or 1, not refused and rest == 0
      else
        -- A key with a mark ` ?` or ` !` outlives the time for the confirmation by three seconds.
        local doubt = string.find(result, ' [?!]', 55) and 3000 or 0
        is_freed = rest == 0 or redis.pcall('PEXPIRE', key, rest + doubt) ~= 1
        serves = is_freed and string.find(result, ' ', 55, true)
        result = 1
      end
      if result == 1 and rest > 0 then hint_waiters(key, redis.pcall('ZRANGE', queue, 0, 0), '=') end
      if serves and (is_freed or (waiting or redis.pcall('ZCARD', queue)) ~= 0) then
        -- As in lua/acquire.lua, `micros` is the µs part of a fencing token.
        local micros, refused, used, head, tail = nil, nil, nil, nil, nil
        -- part: count.lua
        -- If the counter cannot be used, no waiter is granted the key.
        local written = not refused and (set and 0 or redis.pcall('ZADD', counter, micros, 't'))
        local served = type(written) == 'number' and serve(key, queue, micros, set)
        if type(served) == 'string' then is_freed = false end
      end
      if is_freed then result = redis.pcall('DEL', key) end
    end
    if not result then
      result = 0
    elseif type(result) == 'string' then
      result = string.sub(result, 1, 256)
    end
  end
  if mark and (result == 0 or type(result) == 'string') then
    local refused, is_new_connection, keeps_data = nil, false, false
    -- part: quarantine.lua
    result = refused or result
  end
  if result == 0 or type(result) == 'string' then
    -- part: primary.lua
  end
  if results then results[i] = result end
  if result == 1 then done = done + 1 end
end
return done < n and results or result
