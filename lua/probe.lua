-- Purpose: read the clock of a node of a quorum, if the node votes. The script also writes the mark back unchanged: a
--   node that refuses writes must not count as one that votes.
-- KEYS: [1] mark; several probes in one call repeat it
-- ARGV: [1] length of a quarantine in ms; several probes in one call repeat it
-- Returns: for all probes of the call one result: a string, the time of Redis in µs with sixteen digits; an error
--   QUARANTINE and ms: the node abstains for these ms; any other error: refused.
local mark, quarantine = KEYS[1], tonumber(ARGV[1])
local time = redis.call('TIME')
local now = string.format('%010d%06d', time[1], time[2])
local refused, is_new_connection, keeps_data = nil, false, false
-- part: quarantine.lua
local written = refused or redis.pcall('SET', mark, marked)
return written.err and written or now
