-- Purpose: functions for a key that several leases share: a sorted set with a member for each reader or permit. A part
--   of the scripts that say `-- part: shares.lua`.
--   A member is `lh1 <lease> r 1 1 0 <holder>` for a reader, or `lh1 <lease> p <index> <weight> <limit> <holder>` for
--   each of the permits of a lease. Its score is the time in ms at which it ends. The key expires a second after the
--   latest end. If it does not, MIGRATE has moved the key to a server with another clock: MIGRATE keeps the ttl of a
--   key and the scores. Then all ends are moved by the difference, before an end is compared with the clock.
--   Two fractions of a ms mark a score. `.5`: the waiter has not confirmed its grant; `.75`: the waiter was late, and
--   another waiter has called the roll (lua/roll_call.lua). The end is then the next whole ms.
-- KEYS: those of the script
-- ARGV: those of the script
-- Returns: nothing; sets `use_shares`, which returns a table of functions, and `shares`, that table or nil. Requests of
--   exclusive leases need the functions only if leases share the key. A function that returns the shares of a key may
--   return an error FOREIGN and a type instead, or any other error
local shares
local function use_shares()
  if shares then return shares end
  local now_ms = tonumber(string.sub(now, 1, 13))

  -- Reads the mode of a request or of a queue's entry. Returns nil for an exclusive lease, false if no client writes
  -- this mode.
  local function share_of(mode)
    if mode == '' then return nil end
    if mode == 'r' then return { kind = 'r', weight = 1, limit = 0, most = 10000 } end
    local weight, limit = string.match(mode, '^p(%d+)/(%d+)$')
    weight, limit = tonumber(weight), tonumber(limit)
    if not weight or weight < 1 or weight > 1000 or weight > limit or limit > 10000 then return false end
    return { kind = 'p', weight = weight, limit = limit, most = limit }
  end

  -- Returns the members of a share. With `ends`, this end stands before each member.
  local function members_of(share, lease, holder, ends)
    local first, last = 'lh1 ' .. lease .. ' ' .. share.kind .. ' ', ' ' .. share.weight .. ' ' .. share.limit .. ' ' .. holder
    local members = {}
    for i = 1, share.weight do
      if ends then members[#members + 1] = ends end
      members[#members + 1] = first .. i .. last
    end
    return members
  end

  -- Returns the kind, the limit and the weight of a member, and where its holder begins, or nil if no client writes
  -- such a member.
  local function parse(member)
    local head = string.sub(member, 1, 4) == 'lh1 ' and #member <= 256 and member or ''
    local kind, weight, limit, holder_at = string.match(head, '^ ([rp]) %d+ (%d+) (%d+) ()%S+$', 37)
    weight, limit = tonumber(weight), tonumber(limit)
    if not kind or weight < 1 or weight > 1000 or limit > 10000 or kind == 'p' and weight > limit then return nil end
    return kind, limit, weight, holder_at
  end

  -- Returns the share, the lease and the holder of a member, or nil if no client writes such a member.
  local function share_in(member)
    local kind, limit, weight, holder_at = parse(member)
    if not kind then return nil end
    local share = { kind = kind, weight = weight, limit = limit, most = kind == 'r' and 10000 or limit }
    return share, string.sub(member, 5, 36), string.sub(member, holder_at)
  end

  -- Sets `ends` and `limit` of the set to those of its newest member. Returns an error, or nil.
  local function look_at_newest(key, set)
    local newest = redis.pcall('ZRANGE', key, '-1', '-1', 'WITHSCORES')
    if newest.err then return newest end
    if newest[1] then
      set.kind, set.limit = parse(newest[1])
      if not set.kind then return { err = 'FOREIGN zset' } end
    end
    set.ends = math.ceil(newest[2] or 0)
  end

  -- Removes the shares of a key that have ended. With `keeps_late`, keeps those whose waiters have not confirmed their
  -- grants in time, and sets `late` to their members. Returns the shares that are left, nil if there are none, or an
  -- error, such as FOREIGN and a type.
  local function look(key, keeps_late)
    local set = {}
    local refused = look_at_newest(key, set)
    if refused or not set.kind then return refused end
    local till = redis.pcall('PEXPIRETIME', key)
    if type(till) ~= 'number' then
      -- Redis before 7.0. While the script runs, `now_ms` stands still and PTTL does not, so an end is never moved
      -- back.
      till = redis.pcall('PTTL', key)
      if type(till) ~= 'number' then return till end
      if till >= 0 then till = math.max(now_ms + till, set.ends + 1000) end
    end
    local shift = till < 0 and 0 or till - 1000 - set.ends
    if shift > 5 or shift < -5 then
      local all, moved = redis.pcall('ZRANGE', key, 0, -1, 'WITHSCORES'), {}
      if #all > 20000 then return { err = 'FOREIGN zset' } end
      for i = 1, #all, 2 do
        if not parse(all[i]) then return { err = 'FOREIGN zset' } end
        moved[i], moved[i + 1] = all[i + 1] + shift, all[i]
      end
      for i = 1, #moved, 1000 do
        local added = redis.pcall('ZADD', key, 'XX', unpack(moved, i, math.min(i + 999, #moved)))
        if type(added) == 'table' then return added end
      end
      set.ends = set.ends + shift
    end
    if till < 0 then redis.pcall('PEXPIREAT', key, set.ends + 1000) end
    -- Clients never make a larger set, but another user can.
    local has_ended = redis.pcall('ZCOUNT', key, '-inf', '(' .. now_ms) ~= 0
    for _ = 1, has_ended and 80 or 0 do
      local late = set.late or {}
      local ended = redis.pcall('ZRANGE', key, '-inf', '(' .. now_ms, 'BYSCORE', 'LIMIT', #late, '128', 'WITHSCORES')
      if ended.err then return ended end
      local gone = {}
      for i = 1, #ended, 2 do
        if not parse(ended[i]) then return { err = 'FOREIGN zset' } end
        if keeps_late and ended[i + 1] % 1 == 0.5 then
          late[#late + 1] = ended[i]
        else
          gone[#gone + 1] = ended[i]
        end
      end
      set.late = late[1] and late
      local removed = gone[1] and redis.pcall('ZREM', key, unpack(gone))
      if type(removed) == 'table' then return removed end
      if #ended < 256 then break end
    end
    set.used = redis.pcall('ZCARD', key)
    if type(set.used) ~= 'number' then return set.used end
    return set.used > 0 and set or nil
  end

  -- Returns whether the shares of a key leave room for `share`.
  local function fits(share, set)
    return share and share.kind == set.kind and set.used + share.weight <= math.min(share.most, 10000)
  end

  -- Returns for how many ms the shares of a key exclude `share`, or an exclusive lease if it is nil. Returns nil if
  -- they do not.
  local function wait_for(key, share, set)
    if not set or fits(share, set) then return nil end
    local ends = set.ends
    -- The number of members that have to end. If all have to end, the newest one is the last.
    local over = share and share.kind == set.kind and set.used + share.weight - math.min(share.most, 10000)
    if over and over < set.used then
      local last = redis.pcall('ZRANGE', key, over - 1, over - 1, 'WITHSCORES')
      ends = math.ceil(last[2] or ends)
    end
    return math.max(ends - now_ms, 0) + 1
  end

  -- Ends the late shares that `look` has kept. After a roll call, they end half a second from now, so that all living
  -- waiters can reply before the others get these shares. During an earlier roll call, they end with it, at `ends`.
  -- Returns the shares that are left, or nil.
  local function end_late(key, set, is_called, ends)
    if is_called then ends = now_ms + 500 - 0.25 end
    for i = 1, #set.late, 1000 do
      local part, changed = {}, nil
      for at = i, math.min(i + 999, #set.late) do
        if ends then part[#part + 1] = ends end
        part[#part + 1] = set.late[at]
      end
      if ends then
        changed = redis.pcall('ZADD', key, 'XX', unpack(part))
      else
        changed = redis.pcall('ZREM', key, unpack(part))
        if type(changed) == 'number' then set.used = set.used - changed end
      end
    end
    if set.used == 0 then return nil end
    if ends and not look_at_newest(key, set) then redis.pcall('PEXPIREAT', key, set.ends + 1000) end
    return set
  end

  -- Returns the end of the roll call to which waiters may still reply: the score of its late shares. Returns nil if
  -- there is none. Late shares end soon, so they are among the first.
  local function roll_call_end(key)
    local first = redis.pcall('ZRANGE', key, now_ms, '+inf', 'BYSCORE', 'LIMIT', '0', '128', 'WITHSCORES')
    for i = 2, #first, 2 do
      if first[i] % 1 == 0.75 then return first[i] end
    end
  end

  -- Returns the own place of the first waiter that may still reply to a roll call, and the end of the roll call in ms.
  -- Returns nil if there is none.
  local function first_silent(key, queue)
    local silent = redis.pcall('ZRANGE', queue, '4000000000000000', 'inf', 'BYSCORE', 'LIMIT', 0, 1, 'WITHSCORES')
    local ends = silent[2] and roll_call_end(key)
    if ends then return silent[2] - 4000000000000000, math.ceil(ends) end
  end

  -- Gives a lease its share of the key for `ttl` ms. With `must_confirm`, marks the share as not confirmed. Returns the
  -- shares of the key, or an error.
  local function give(key, share, lease, holder, ttl, set, must_confirm)
    local ends = now_ms + ttl
    set = set or { kind = share.kind, used = 0, ends = 0 }
    -- A later grant of the same ms to this lease has a greater score without the mark.
    local score = must_confirm and ends - 0.5 or ends
    local added = redis.pcall('ZADD', key, 'GT', unpack(members_of(share, lease, holder, score)))
    if type(added) == 'table' then return added end
    set.used = set.used + added
    if ends >= set.ends then
      set.ends, set.limit = ends, share.limit
      local kept = redis.pcall('PEXPIREAT', key, ends + 1000)
      if type(kept) == 'table' then
        redis.pcall('ZREM', key, unpack(members_of(share, lease, holder)))
        return kept
      end
    end
    return set
  end

  shares = {
    now_ms = now_ms, share_of = share_of, share_in = share_in, members_of = members_of,
    look_at_newest = look_at_newest, look = look, fits = fits, wait_for = wait_for, give = give, end_late = end_late,
    roll_call_end = roll_call_end, first_silent = first_silent,
  }
  return shares
end
