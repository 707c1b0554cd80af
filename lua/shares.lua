-- Purpose: functions for a key that several leases share: a sorted set with a member for each reader or permit. A part
--   of the scripts that say `-- part: shares.lua`.
--   A member is `lh1 <lease> r 1 1 0 <holder>` for a reader, or `lh1 <lease> p <index> <weight> <limit> <holder>` for
--   each of the permits of a lease. Its score is the time in ms at which it ends. The key expires a second after the
--   latest end. If it does not, MIGRATE has moved the key to a server with another clock: MIGRATE keeps the ttl of a
--   key and the scores. Then all ends are moved by the difference, before an end is compared with the clock.
-- KEYS: those of the script
-- ARGV: those of the script
-- Returns: nothing; sets `use_shares`, which returns a table of functions, and `shares`, that table or nil. Requests of
--   exclusive leases need them only if leases share the key. A function that returns the shares of a key may return an
--   error FOREIGN and a type instead, or any other error
local shares
local function use_shares()
  if shares then return shares end
  local now_ms = tonumber(string.sub(now, 1, 13))

  -- The mode of a request or of a queue's entry: nil if it is exclusive, false if no client writes it.
  local function share_of(mode)
    if mode == '' then return nil end
    if mode == 'r' then return { kind = 'r', weight = 1, limit = 0, most = 10000 } end
    local weight, limit = string.match(mode, '^p(%d+)/(%d+)$')
    weight, limit = tonumber(weight), tonumber(limit)
    if not weight or weight < 1 or weight > 1000 or weight > limit or limit > 10000 then return false end
    return { kind = 'p', weight = weight, limit = limit, most = limit }
  end

  -- The members of a share. With `ends`, each follows its end.
  local function members_of(share, lease, holder, ends)
    local first, last = 'lh1 ' .. lease .. ' ' .. share.kind .. ' ', ' ' .. share.weight .. ' ' .. share.limit .. ' ' .. holder
    local members = {}
    for i = 1, share.weight do
      if ends then members[#members + 1] = ends end
      members[#members + 1] = first .. i .. last
    end
    return members
  end

  -- The share and the lease and holder of a member; nil if no client writes it.
  local function share_in(member)
    local lease, kind, weight, limit, holder =
      string.match(#member <= 256 and member or '', '^lh1 (%x+) ([rp]) %d+ (%d+) (%d+) (%S+)$')
    weight, limit = tonumber(weight), tonumber(limit)
    if not lease or #lease ~= 32 or weight < 1 or weight > 1000 or limit > 10000 then return nil end
    if kind == 'p' and weight > limit then return nil end
    return { kind = kind, weight = weight, limit = limit, most = kind == 'r' and 10000 or limit }, lease, holder
  end

  -- Sets `ends` and `limit` of the set to those of its newest member. Returns an error, or nil.
  local function look_at_newest(key, set)
    local newest = redis.pcall('ZRANGE', key, '-1', '-1', 'WITHSCORES')
    if newest.err then return newest end
    local share = newest[1] and share_in(newest[1])
    if newest[1] and not share then return { err = 'FOREIGN zset' } end
    set.kind, set.limit, set.ends = share and share.kind, share and share.limit, tonumber(newest[2] or 0)
  end

  -- The shares of a key, without those that have ended: nil if there are none; an error, also FOREIGN and a type.
  local function look(key)
    local set = {}
    local refused = look_at_newest(key, set)
    if refused or not set.kind then return refused end
    local till = redis.pcall('PEXPIRETIME', key)
    if type(till) ~= 'number' then
      -- Redis before 7.0. TIME stands still while a script runs, and PTTL does not, so an end is never moved back.
      till = redis.pcall('PTTL', key)
      if type(till) ~= 'number' then return till end
      if till >= 0 then till = math.max(now_ms + till, set.ends + 1000) end
    end
    local shift = till < 0 and 0 or till - 1000 - set.ends
    if shift > 5 or shift < -5 then
      local all, moved = redis.pcall('ZRANGE', key, 0, -1, 'WITHSCORES'), {}
      if #all > 20000 then return { err = 'FOREIGN zset' } end
      for i = 1, #all, 2 do
        if not share_in(all[i]) then return { err = 'FOREIGN zset' } end
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
    for _ = 1, 80 do
      local ended = redis.pcall('ZRANGE', key, '-inf', '(' .. now_ms, 'BYSCORE', 'LIMIT', '0', '128')
      if ended.err then return ended end
      if not ended[1] then break end
      for _, member in ipairs(ended) do
        if not share_in(member) then return { err = 'FOREIGN zset' } end
      end
      local gone = redis.pcall('ZREM', key, unpack(ended))
      if type(gone) == 'table' then return gone end
      if #ended < 128 then break end
    end
    set.used = redis.pcall('ZCARD', key)
    if type(set.used) ~= 'number' then return set.used end
    return set.used > 0 and set or nil
  end

  -- For how many ms the shares of a key exclude the share, or an exclusive lease; nil if they do not.
  local function wait_for(key, share, set)
    if not set then return nil end
    local ends = set.ends
    if share and share.kind == set.kind then
      local over = math.max(set.used + share.weight - share.most, set.used + share.weight - 10000)
      if over <= 0 then return nil end
      local last = redis.pcall('ZRANGE', key, over - 1, over - 1, 'WITHSCORES')
      ends = tonumber(last[2] or ends)
    end
    return ends - now_ms + 1
  end

  -- Gives a lease its share of the key for `ttl` ms. Returns the shares of the key, or an error.
  local function give(key, share, lease, holder, ttl, set)
    local ends = now_ms + ttl
    set = set or { kind = share.kind, used = 0, ends = 0 }
    local added = redis.pcall('ZADD', key, 'GT', unpack(members_of(share, lease, holder, ends)))
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
    look_at_newest = look_at_newest, look = look, wait_for = wait_for, give = give,
  }
  return shares
end
