-- Purpose: set `refused` while this node of a quorum must not vote, because it may have lost locks and could grant them
--   a second time. A part of the scripts that say `-- part: quarantine.lua`.
--   `mark` contains the run id of the server's process, a space, and the time in µs at which the server's data begins.
--   Only lua/data.lua, once for each new connection, compares the run id, since INFO takes long. If the mark is missing,
--   as after FLUSHALL, or its time is in the future, this part writes a new mark and the quarantine begins.
-- KEYS: those of the script
-- ARGV: those of the script
-- Returns: nothing; `marked` is the mark as it was read; `left` is the ms until the node votes, 0 or less if it votes;
--   `refused` is an error QUARANTINE and these ms, another error, or nil
local marked, run, since = redis.pcall('GETRANGE', mark, '0', '63'), nil, nil
if type(marked) == 'string' then
  run, since = string.match(marked, '^(%x+) (%d+)$')
else
  refused = marked
end
local is_usable = since and #since == 16 and since <= now
if not refused and (is_new_connection or not is_usable) then
  local info = redis.pcall('INFO', 'server')
  local own = type(info) == 'string' and string.match(info, 'run_id:(%x+)')
  if not own then
    refused = type(info) == 'table' and info or { err = 'ERR INFO names no run_id' }
  elseif own ~= run or not is_usable then
    -- If the server has its mark and loses no data in a crash, its data begins at the time of the earlier process.
    if not (keeps_data and is_usable) then since = now end
    local marked_now = redis.pcall('SET', mark, own .. ' ' .. since)
    if marked_now.err then refused = marked_now end
  end
end
local left = refused and quarantine or math.ceil((quarantine * 1000 - (now - since)) / 1000)
if not refused and left > 0 then refused = { err = 'QUARANTINE ' .. string.format('%.0f', left) } end
