-- Purpose: grant a key to the first waiter of its queue whose client still listens, and notify that client.
--   A part of lua/join.lua and lua/release.lua.
--   The queue of a key is a sorted set of `<lease id>,<ttl in ms, or 0 for a waiter that polls>,<holder>`. The score
--   is the place of the waiter: the time in µs at which it joined.
--   A stopped process still counts as listening. So a waiter has to confirm its grant with an acquire if it joined more
--   than a second ago, or more than a third of its ttl ago. With a ttl of 500 ms or less, it has to if it joined more
--   than 500 ms ago. It has a quarter of its ttl to do so, at least 500 ms and at most 2 s, and at most its ttl. `?` in
--   the message asks the waiter to confirm, and ` ?` in the key's value marks the grant as not confirmed. (After
--   a third of its ttl, a waiter confirms in any case, since its validity counts from its first request.)
--   The key outlives the time for the confirmation by 3 s, so that the next request of another waiter finds the mark
--   and calls the roll (lua/roll_call.lua).
--   Places below 10^15 belong to waiters that confirmed an earlier grant too late. They come first, and have up to 3 s
--   to confirm.
--   Waiters that were silent at the last roll call come last. If the first waiter is silent, all are: the script
--   deletes the queue, and asks 1,000 of them to send a request. Those that are alive join again.
-- KEYS: those of the script
-- ARGV: those of the script
-- Returns: the lease id that has the key now; nil if the queue is empty or 10,000 entries were skipped; an error: the
--   key is not granted
local function serve(key, queue, micros, own_lease, own_ttl)
  local gone = 0
  -- Another user can make a queue longer than clients do. Redis serves no other request during this loop.
  while gone < 10000 do
    local first = redis.pcall('ZPOPMIN', queue)
    if first.err then return first end
    if not first[1] then return nil end
    gone = gone + 1
    if tonumber(first[2]) >= 4000000000000000 then
      local hinted, hint = redis.pcall('ZRANGE', queue, 0, 998), '='
      table.insert(hinted, 1, first[1])
      -- part: hint.lua
      redis.pcall('DEL', queue)
      return nil
    end
    local lease, asked, holder = string.match(#first[1] <= 256 and first[1] or '', '^(%x+),(%d+),(%S+)$')
    local ms = tonumber(asked)
    -- An entry of another form belongs to another user, and is skipped. The longest ttl is 24 h.
    if lease and #lease == 32 and (asked == '0' or asked >= '1') and ms <= 86400000 then
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
        local waiting = redis.pcall('ZCARD', queue)
        local more = waiting ~= 0 and ' +' or ''
        local doubt = mark ~= '' and ' ?' or ''
        local value = 'lh1 ' .. lease .. ' ' .. micros .. ' ' .. holder .. doubt .. more
        local set = redis.pcall('SET', key, value, 'PX', ttl + kept)
        if set.err then return set end
        if not is_own and not polls then
          local message = lease .. ' ' .. mark .. micros .. ' ' .. key
          -- part: publish.lua
          -- If an ACL forbids the message, the key expires soon.
          if type(published) == 'table' then redis.pcall('PEXPIRE', key, 100 + kept) end
        end
        if type(waiting) == 'number' and waiting > 8 - gone then
          -- part: near.lua
        end
        return lease
      end
    end
  end
  -- The next request continues with the queue.
  -- part: near.lua
end
