-- Purpose: release a share of a key, or remove its lease from the queue. Then serve the queue, if it changed who can
--   share the key. A part of lua/release.lua, also for an exclusive lease that leaves the queue of a key with shares.
--   With `kept`, a permit ends at this time after its grant, and not before.
-- KEYS: those of the script
-- ARGV: those of the script
-- Returns: nothing; sets `result`
local time = redis.call('TIME')
local now = string.format('%010d%06d', time[1], time[2])
-- part: shares.lua
use_shares()
local now_ms, members_of = shares.now_ms, shares.members_of
local share, holder, serves = shares.share_of(mode), own, false
if member then
  local _
  share, _, holder = shares.share_in(member)
end
local set = shares.look(key)
result = 0
if set and set.err then
  result, set = set, nil
  if string.sub(result.err, 1, 9) == 'WRONGTYPE' then
    -- part: stored.lua
    result = value or 0
  end
end
-- A waiter leaves the queue of a key with a foreign value, too.
if ttl or type(result) ~= 'table' then
  local members = share and members_of(share, lease, holder)
  if set and members and redis.pcall('ZSCORE', key, members[1]) then
    local too_early = false
    if after and not ttl then
      local message = string.sub(lease, 1, 16) .. ' !' .. string.match(after, '^.(%S+)') .. ' ' .. key
      -- part: channel.lua
      if string.sub(after, 1, 1) == '?' then
        -- part: listeners.lua
        -- A share has no time of its grant, so it counts as new.
        too_early = listeners == 0
      end
      -- part: publish.lua
    end
    if too_early then
      result = 2
    else
      local rest, gone = since and math.min(kept, math.ceil(since / 1000) + kept - now_ms) or 0, nil
      if rest > 0 then
        gone = redis.pcall('ZADD', key, 'XX', unpack(members_of(share, lease, holder, now_ms + rest)))
      else
        gone = redis.pcall('ZREM', key, unpack(members))
        if type(gone) == 'number' then set.used = set.used - gone end
      end
      local refused = type(gone) == 'table' and gone or set.used > 0 and shares.look_at_newest(key, set)
      if set.used > 0 and not refused then redis.pcall('PEXPIREAT', key, set.ends + 1000) end
      if set.used == 0 then set = nil end
      result, serves = refused or 1, not refused and rest <= 0
      if rest > 0 then
        local hinted, hint = redis.pcall('ZRANGE', queue, 0, 0), '='
        -- part: hint.lua
      end
    end
  elseif ttl then
    local left, gone = redis.pcall('ZREM', queue, ARGV[i], lease .. ',0' .. mode .. ',' .. holder), 1
    if type(left) == 'table' then
      result = left
    elseif left > 0 then
      -- part: near.lua
      result, serves = 1, set
    end
  end
  if type(result) == 'string' then result = string.sub(result, 1, 256) end
  local waiting = serves and redis.pcall('ZCARD', queue) or 0
  if type(waiting) == 'number' and waiting > 0 then
    local micros, refused, used, head, tail = nil, nil, nil, nil, nil
    -- part: count.lua
    local written = not refused and (set and 1 or redis.pcall('ZADD', counter, micros, 't'))
    if type(written) == 'number' then
      -- part: serve.lua
      serve(key, queue, micros, set)
    end
  end
end
