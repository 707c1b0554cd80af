-- Purpose: release a share in the usual case: the queue is empty, and no share has ended. A part of
--   lua/release.lua, which decides in all other cases.
-- KEYS: those of the script
-- ARGV: those of the script
-- Returns: nothing; sets `waiting` to the length of the queue, and `result` to 1 if the share was released
waiting = redis.pcall('ZCARD', queue)
if waiting == 0 then
  local share, form, count = string.sub(lease, 10), ' r 1 1 0 ', 1
  if string.find(share, form, 37, true) ~= 37 then
    form, count = ' p ', tonumber(string.match(share, '^ p 1 (%d+) ', 37))
  end
  -- part: usual_shares.lua
  if ends and ends > 0 and count then
    local gone, is_newest = nil, newest[1] == share
    if count == 1 then
      gone = redis.pcall('ZREM', key, share)
    else
      local members = { share }
      for at = 2, count do members[at] = string.sub(share, 1, 39) .. at .. string.sub(share, 41) end
      gone = redis.pcall('ZREM', key, unpack(members))
      is_newest = string.sub(newest[1], 1, 36) == string.sub(share, 1, 36)
    end
    if type(gone) == 'number' and gone > 0 then
      if is_newest then
        newest = redis.pcall('ZRANGE', key, '-1', '-1', 'WITHSCORES')
        if newest[1] then redis.pcall('PEXPIREAT', key, math.ceil(newest[2]) + 1000) end
      end
      result = 1
    end
  end
end
