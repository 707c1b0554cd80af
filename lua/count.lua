-- Purpose: set `micros` to the time of the next grant: the time of Redis, but at least one µs after the last grant. A
--   part of the scripts that say `-- part: count.lua`. They run it before they may grant a key. A request that only
--   joins the queue of a taken key does not read the counter.
-- KEYS: those of the script
-- ARGV: those of the script
-- Returns: nothing; `refused` is set if the counter cannot be used
if used then
  -- Adds one to the last six digits: it takes a µs to format the whole number.
  head, tail = head or string.sub(used, 1, 10), (tail or tonumber(string.sub(used, 11))) + 1
  micros = tail < 1000000 and head .. string.format('%06d', tail) or string.format('%.0f', used + 1)
elseif not micros then
  micros = now
  local last = redis.pcall('ZSCORE', counter, 't')
  -- Near 2^53, a double cannot hold every whole number.
  if last and (last.err or #last ~= 16 or string.find(last, '%D') or last > '9007199254000000') then
    refused = last
    if not last.err or string.sub(last.err, 1, 9) == 'WRONGTYPE' then
      refused = { err = 'ERR the fence counter ' .. counter .. ' does not hold a time in µs' }
    end
  elseif last and last >= micros then
    micros = string.format('%.0f', last + 1)
  end
end
