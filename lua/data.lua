-- Purpose: begin the quarantine of a node of a quorum if its process is a new one and may have lost data. Each new
--   connection calls this script before it sends other requests. Connections end with their process, so a new process
--   gets this call before any other request.
-- KEYS: [1] mark
-- ARGV: [1] length of a quarantine in ms, [2] `1` if the server writes each command to disk before it replies
-- Returns: an array of a string: the time in µs, and a number: the ms until the node votes, or 0; any error but
--   QUARANTINE: refused
local mark, quarantine = KEYS[1], tonumber(ARGV[1])
local time = redis.call('TIME')
local now = string.format('%010d%06d', time[1], time[2])
local refused, is_new_connection, keeps_data = nil, true, ARGV[2] == '1'
-- part: quarantine.lua
if refused and string.sub(refused.err, 1, 11) ~= 'QUARANTINE ' then return refused end
return { now, math.max(left, 0) }
