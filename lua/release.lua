-- Purpose: release each lock key that its lease still holds: grant the key to the first waiter of its queue, which
--   lua/serve.lua describes, or delete it. If the lease is queued, remove it from the queue.
-- KEYS: [1] fence counter, [2 .. n+1] lock keys, [n+2 .. 2n+1] their queues, [2n+2] on a node of a quorum, its mark
-- ARGV: for each lock key: lease id: it has one of these forms:
--   `lh1 <lease id> <µs> <holder>`: a release of a lease that was granted. `<µs>` is the µs part of its token, or
--   sixteen zeros if plain commands granted it. The argument is the whole value of the lease's key, unless waiters are
--   queued: the value then also has a mark;
--   `<lease id>`: a release of a lease that may have been granted;
--   `<lease id>!<holder>`: this holder takes the key by force, and the lease's holder is notified;
--   `<lease id>?<holder>`: the same, but not while the grant is less than a second old and the lease's holder does not
--   listen;
--   `<lease id>,<ttl in ms><mode>,<holder>`: a release of a lease that may be queued with this ttl. The mode is that of
--   its acquire, empty for an exclusive lease;
--   `keep <µs> <ms> ` and a lease id, or the first member of a share (lua/shares.lua): a release of a lease that was
--   granted at `<µs>`. The key, or the permits, stay taken until `<ms>` after the grant.
--   A share that is taken by force has its first member behind the holder and a space.
--   Last, on a Cluster: the start of the server's shard channels, to which the script appends a holder. On a node of a
--   quorum: length of a quarantine in ms.
-- Returns: for one lock key its result, for several keys an array of results, or 1: all were released. A result
--   is 1: released; 0: the key is missing; 2: not released, since the lease's holder does not listen yet; a string:
--   another lease holds the key, the key's value; an error QUARANTINE and ms: the lease does not hold the
--   key, and the node of a quorum may have lost it; an error FOREIGN and a type: the key holds no shares of this
--   library; any other error: refused.
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
for i = 1, n do
  local key, queue, lease, after = KEYS[i + 1], KEYS[n + 1 + i], ARGV[i], nil
  local ttl, mode, own, member, since, kept = nil, '', nil, nil, nil, nil
  if string.sub(lease, 1, 5) == 'keep ' then
    since, kept, lease = string.match(lease, '^keep (%d+) (%d+) (.+)$')
    if #lease > 32 then member = lease end
  end
  if string.sub(lease, 1, 4) == 'lh1 ' then lease = string.sub(lease, 5, 36) end
  if #lease > 32 and string.find(lease, '^[!?,]', 33) then
    lease, after = string.sub(lease, 1, 32), string.sub(lease, 33)
    if string.sub(after, 1, 1) == ',' then
      ttl, mode, own = string.match(after, '^,(%d*)([rp]?[%d/]*),(.*)$')
      -- An argument of another form names no entry of a queue.
      mode = mode or ''
    else
      member = string.match(after, ' (.+)$')
    end
  end
  local is_share = member or mode ~= ''
  -- The loop above has set the result to 1 if it deleted the key.
  result = results and results[i]
  if not result and not is_share then
    -- part: stored.lua
    result = value
    is_share = ttl and result and result.err and string.sub(result.err, 1, 9) == 'WRONGTYPE'
  end
  if is_share then
    -- part: release_share.lua
  elseif type(result) == 'string' and string.sub(result, 1, 36) == 'lh1 ' .. lease then
    local too_early, is_kept = false, false
    if after and string.find(after, '^[!?]') then
      local holder = string.match(result, '^%S+', 55) or ''
      local message = string.sub(lease, 1, 16) .. ' !' .. string.sub(after, 2) .. ' ' .. key
      -- part: channel.lua
      if string.sub(after, 1, 1) == '?' then
        -- part: listeners.lua
        if listeners == 0 then
          -- A grant by plain commands has no time, so it counts as new.
          local time, granted = redis.call('TIME'), tonumber(string.sub(result, 38, 53))
          too_early = granted == 0 or granted and time[1] * 1000000 + time[2] - granted < 1000000
        end
      end
      -- part: publish.lua
    end
    local served = nil
    if since then
      local time = redis.call('TIME')
      local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
      local rest = math.min(kept, math.ceil(since / 1000) + kept - now_ms)
      if rest > 0 then
        -- A key with this mark outlives the time for the confirmation by three seconds.
        if string.find(result, ' [?!]', 55) then rest = rest + 3000 end
        is_kept = redis.pcall('PEXPIRE', key, rest) == 1
        local hinted, hint = redis.pcall('ZRANGE', queue, 0, 0), '='
        -- part: hint.lua
      end
    end
    if not too_early and not is_kept and string.find(result, ' ', 55, true) then
      -- As in lua/acquire.lua, `micros` is the µs part of a fencing token. It is false if the counter cannot be used.
      local time = redis.call('TIME')
      local now = time[1] .. time[2]
      if #now ~= 16 then now = string.format('%010d%06d', time[1], time[2]) end
      local micros, refused, used, head, tail = nil, nil, nil, nil, nil
      -- part: count.lua
      -- part: shares.lua
      micros = not refused and type(redis.pcall('ZADD', counter, micros, 't')) == 'number' and micros
      -- part: serve.lua
      served = micros and serve(key, queue, micros)
    end
    result = too_early and 2 or (is_kept or type(served) == 'string') and 1 or redis.pcall('DEL', key)
  elseif result ~= 1 then
    local gone = 1
    local left = ttl and redis.pcall('ZREM', queue, ARGV[i], lease .. ',0,' .. own)
    if type(left) == 'number' and left > 0 then
      -- part: near.lua
      result = 1
    elseif type(left) == 'table' then
      result = left
    elseif not result then
      result = 0
    elseif not result.err then
      result = string.sub(result, 1, 256)
    end
  end
  if mark and (result == 0 or type(result) == 'string') then
    local time = redis.call('TIME')
    local now = string.format('%010d%06d', time[1], time[2])
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
