-- Purpose: grant a key to the first waiter of its queue whose client still listens, and notify that client. Waiters
--   that can share the key are granted it together, in the order of the queue, at most 128. If leases share the key
--   already (`set`), waiters are granted it as long as the next one can share it, too. Another one stays first.
--   A part of lua/join.lua and lua/release.lua.
--   The queue of a key is a sorted set of `<lease id>,<ttl in ms, or 0 for a waiter that polls><mode>,<holder>`. The
--   score is the place of the waiter: the time in µs at which it joined. The mode is empty for an exclusive lease,
--   otherwise as in lua/shares.lua.
--   A stopped process still counts as listening. So a waiter has to confirm its grant with an acquire if it joined more
--   than a second ago, or more than a third of its ttl ago. With a ttl of 500 ms or less, it has to if it joined more
--   than 500 ms ago. It has a quarter of its ttl to do so, at least 500 ms and at most 2 s, and at most its ttl. `?` in
--   the message asks the waiter to confirm, and ` ?` in the key's value marks the grant as not confirmed. (After
--   a third of its ttl, a waiter confirms in any case, since its validity counts from its first request.)
--   A share that its waiter has not confirmed ends with this time, and needs no mark.
--   A key with ` ?` outlives the time for the confirmation by 3 s, so that the next request of another waiter finds the mark
--   and calls the roll (lua/roll_call.lua).
--   Places below 10^15 belong to waiters that confirmed an earlier grant too late. They come first, and have up to 3 s
--   to confirm.
--   Waiters that were silent at the last roll call come last. If the first waiter is silent, all are: the script
--   deletes the queue, and asks 1,000 of them to send a request. Those that are alive join again.
-- KEYS: those of the script
-- ARGV: those of the script
-- Returns: the first lease id that was granted the key; nil if there is none, or 10,000 entries were skipped; an error:
--   the key is not granted. Then: the µs of the last grant, those of the caller's grant, and the shares of the key
local function serve(key, queue, micros, set, own_lease, own_ttl)
  local gone, shares_given, waiting, served, last, own = 0, 0, nil, nil, nil, nil
  -- Another user can make a queue longer than clients do. Redis serves no other request during this loop.
  for _ = 1, 10000 do
    -- If leases share the key, the first waiter may have to stay in the queue.
    local first = set and redis.pcall('ZRANGE', queue, 0, 0, 'WITHSCORES') or redis.pcall('ZPOPMIN', queue)
    if first.err and not served then return first, nil, nil, set end
    if not first[1] then return served, last, own, set end
    if tonumber(first[2]) >= 4000000000000000 then
      local hinted, hint = redis.pcall('ZRANGE', queue, 0, 998), '='
      if not set then table.insert(hinted, 1, first[1]) end
      -- part: hint.lua
      redis.pcall('DEL', queue)
      return served, last, own, set
    end
    local lease, asked, wanted, holder =
      string.match(#first[1] <= 256 and first[1] or '', '^(%x+),(%d+)([rp]?[%d/]*),(%S+)$')
    local ms, share = tonumber(asked), nil
    if wanted and wanted ~= '' then share = use_shares().share_of(wanted) end
    local is_shown, fits, is_alone = set, not set, false
    -- An entry of another form belongs to another user, and is skipped. The longest ttl is 24 h.
    if lease and #lease == 32 and (asked == '0' or asked >= '1') and ms <= 86400000 and share ~= false then
      -- part: channel.lua
      local is_own, polls, ttl, mark = lease == own_lease, asked == '0', asked, ''
      local place, kept = tonumber(first[2]), 0
      local was_late = place < 1000000000000000
      if is_own then
        ttl = own_ttl
      elseif polls then
        ttl = was_late and 1000 or 100
      elseif now - place > (ms > 500 and 1000 * math.min(ms / 3, 1000) or 500000) then
        ttl, mark, kept = was_late and 3000 or math.min(math.max(math.floor(ms / 4), 500), 2000), '?', 3000
        ttl = math.min(ms, ttl)
      end
      local listens = is_own or polls
      if not listens then
        -- part: listeners.lua
        listens = listeners ~= 0
      end
      if listens then
        local wait = set and shares.wait_for(key, share, set)
        if set then fits = not wait end
        if fits and shares_given == 128 or wait and wait <= 1000 and gone > 0 and not is_own then
          -- Redis serves others first, or the waiter can have the key sooner than it sends its next request. Ask for one.
          local hinted, hint = { first[1] }, '='
          -- part: hint.lua
          break
        end
        if not fits then break end
        if share then
          -- The caller has written the counter for the first grant only if the key is free.
          local given = set and redis.pcall('ZADD', counter, micros, 't') or redis.pcall('DEL', key)
          if type(given) == 'number' then given = shares.give(key, share, lease, holder, ttl, set) end
          if given.err then return served or given, last, own, set end
          set = given
        else
          waiting = redis.pcall('ZCARD', queue)
          local more = waiting ~= 0 and ' +' or ''
          local doubt = mark ~= '' and ' ?' or ''
          local value = 'lh1 ' .. lease .. ' ' .. micros .. ' ' .. holder .. doubt .. more
          local written = redis.pcall('SET', key, value, 'PX', ttl + kept)
          if written.err then return written end
          is_alone = true
        end
        served, last = served or lease, micros
        if is_own then own = micros end
        if not is_own and not polls then
          local message = lease .. ' ' .. mark .. micros .. ' ' .. key
          -- part: publish.lua
          -- If an ACL forbids the message, the key expires soon.
          if type(published) == 'table' and not share then redis.pcall('PEXPIRE', key, 100 + kept) end
        end
        if share then shares_given, micros = shares_given + 1, string.format('%.0f', micros + 1) end
      end
    end
    gone = gone + 1
    if is_shown then redis.pcall('ZREM', queue, first[1]) end
    if is_alone then break end
  end
  -- If nobody was granted the key, the next request continues with the queue.
  if gone > 0 and (not waiting or type(waiting) == 'number' and waiting > 8 - gone) then
    -- part: near.lua
  end
  return served, last, own, set
end
