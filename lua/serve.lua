-- Purpose: grant a key to the first waiter of its queue whose client still listens, and notify that client. Waiters
--   that can share the key are granted it together, in the order of the queue, at most 128. If leases share the key
--   already (`set`), the script grants it to waiters until one cannot share it. That waiter stays first in the queue. A
--   part of lua/join.lua and lua/release.lua, behind lua/shares.lua. Sets `hint_waiters` (lua/hint.lua), too.
--   The queue of a key is a sorted set of `<lease id>,<ttl in ms, or 0 for a waiter that polls><mode>,<holder>`. The
--   score is the place of the waiter: the time in µs at which it joined. The mode is empty for an exclusive lease,
--   otherwise as in lua/shares.lua.
--   A stopped process still counts as listening. So a waiter has to confirm its grant with an acquire if it joined more
--   than a second ago, or more than a third of its ttl ago. With a ttl of 500 ms or less, it has to confirm if it
--   joined more than 500 ms ago. It has a quarter of its ttl to do so, at least 500 ms and at most 2 s, and at most its
--   ttl. `?` in the message asks the waiter to confirm, and ` ?` in the key's value marks the grant as not confirmed.
--   (After a third of its ttl, a waiter confirms in any case, since its validity counts from its first request.)
--   A share that its waiter has not confirmed ends when this time ends. Its score marks it (lua/shares.lua).
--   A key with ` ?` outlives the time for the confirmation by 3 s, so that the next request of another waiter finds the
--   mark and calls the roll (lua/roll_call.lua).
--   Places below 10^15 belong to waiters that confirmed an earlier grant too late. They come first, and have up to 3 s
--   to confirm.
--   Waiters that have not replied to the last roll call come last. If the first waiter is silent, all are: the script
--   deletes the queue, and asks 1,000 of them to send a request. Those that are alive join again.
--   While waiters may still reply to the roll call of a shared key, no waiter is granted a share before a silent waiter
--   with an earlier place, and the queue stays.
-- KEYS: those of the script
-- ARGV: those of the script
-- Returns: the first lease id that was granted the key; nil if there is none, or 10,000 entries were skipped; an error:
--   the key is not granted. Three further results: the µs of the last grant, the µs of the caller's grant, and the
--   shares of the key. If the waiters that are left have to wait for replies to a roll call, `called` of the shares is
--   the end of the roll call in ms
-- part: hint.lua
local function serve(key, queue, micros, set, own_lease, own_ttl)
  local gone, shares_given, waiting, served, last, own = 0, 0, nil, nil, nil, nil
  local silent_place, call_ends
  if set then silent_place, call_ends = shares.first_silent(key, queue) end
  -- Another user can make a queue longer than clients do. Redis serves no other request during this loop.
  for _ = 1, 10000 do
    -- If leases share the key, the first waiter may have to stay in the queue.
    local first = set and redis.pcall('ZRANGE', queue, 0, 0, 'WITHSCORES') or redis.pcall('ZPOPMIN', queue)
    if first.err and not served then return first, nil, nil, set end
    if not first[1] then return served, last, own, set end
    local place = tonumber(first[2])
    if silent_place and place >= silent_place then
      set.called = call_ends
      break
    end
    if place >= 4000000000000000 then
      local hinted = redis.pcall('ZRANGE', queue, 0, 998)
      if not set then table.insert(hinted, 1, first[1]) end
      hint_waiters(key, hinted, '=')
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
      local is_own, polls, ttl, mark = lease == own_lease, asked == '0', asked, ''
      local kept, was_late = 0, place < 1000000000000000
      if is_own then
        ttl = own_ttl
      elseif polls then
        ttl = was_late and 1000 or 100
      elseif now - place > (ms > 500 and 1000 * math.min(ms / 3, 1000) or 500000) then
        ttl, mark, kept = was_late and 3000 or math.min(math.max(math.floor(ms / 4), 500), 2000), '?', 3000
        ttl = math.min(ms, ttl)
      end
      local listens = is_own or polls
      -- part: channel.lua
      if not listens then
        -- part: listeners.lua
        listens = listeners ~= 0
      end
      if listens then
        if set then fits = shares.fits(share, set) end
        local wait = not fits and (gone > 0 or not own_lease) and not is_own and shares.wait_for(key, share, set)
        if fits and shares_given == 128 or wait and wait <= 1000 then
          -- Asks the waiter for a request: Redis has to serve other clients first, or the key may be free before the
          -- waiter's next request. The end of a share that was released may have kept the waiter asleep.
          hint_waiters(key, { first[1] }, '=')
          break
        end
        if not fits then break end
        if share then
          -- The caller of `serve` has written the counter for the first grant only if the key was free.
          local given = set and redis.pcall('ZADD', counter, micros, 't') or redis.pcall('DEL', key)
          if type(given) == 'number' then given = shares.give(key, share, lease, holder, ttl, set, mark ~= '') end
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
  -- If no waiter was granted the key, the next request continues with the queue.
  if gone > 0 and (not waiting or type(waiting) == 'number' and waiting > 8 - gone) then
    -- part: near.lua
  end
  return served, last, own, set
end
