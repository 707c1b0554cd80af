-- Purpose: grant a share in the usual case: the queue is empty, and the shares of the key leave room. A part of
--   lua/acquire.lua. In all other cases, lua/join.lua decides.
-- KEYS: those of the script
-- ARGV: those of the script
-- Returns: nothing; sets `result` if the share was granted, or Redis refused a write; sets `known` to the shares of the
--   key if they leave no room
local form, count, limit, most = ' r 1 1 0 ', 1, 0, 10000
if asked ~= 'r' then
  form = ' p '
  count, limit = string.match(asked, '^p(%d+)/(%d+)$')
  count, limit = tonumber(count), tonumber(limit)
  most = limit
end
-- part: usual_shares.lua
-- A request of another form gets an error from lua/join.lua.
if ends and (form ~= ' p ' or count and count >= 1 and count <= 1000 and count <= limit and limit <= 10000) then
  local held = ends > 0 and redis.pcall('ZCARD', key) or 0
  if count + held > most then
    -- The full path needs the same table as lua/shares.lua makes.
    local newest_limit = tonumber(string.match(newest[1], '^ %a %d+ %d+ (%d+) ', 37))
    known = { kind = string.sub(form, 2, 2), used = held, ends = math.ceil(ends), limit = newest_limit }
  else
    local written = used and 0 or redis.pcall('ZADD', counter, 'GT', 'CH', now, 't')
    if written == 1 then
      micros = now
    else
      -- The counter already contains this time, or a later one.
      -- part: count.lua
      written = refused or redis.pcall('ZADD', counter, micros, 't')
    end
    result = written
    if type(written) == 'number' then
      local own_end = now_ms + ttl
      local members = { own_end, 'lh1 ' .. lease .. form .. holder }
      if form == ' p ' then
        -- Formats the number once, and not for each permit.
        local text, first = string.format('%.0f', own_end), 'lh1 ' .. lease .. form
        local last = ' ' .. count .. ' ' .. limit .. ' ' .. holder
        for at = 1, count do members[2 * at - 1], members[2 * at] = text, first .. at .. last end
      end
      result = redis.pcall('ZADD', key, 'GT', unpack(members))
      local is_newest = type(result) == 'number' and ends <= own_end
      local kept = is_newest and redis.pcall('PEXPIREAT', key, own_end + 1000)
      if type(kept) == 'table' then
        for at = 1, count do redis.pcall('ZREM', key, members[2 * at]) end
        result = kept
      end
    end
    if type(result) == 'number' then result, used, granted = micros, micros, granted + 1 end
  end
end
