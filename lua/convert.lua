-- Purpose: change the mode in which each lease holds its key, in one step and under a greater token. The only reader of
--   a key becomes its writer (an upgrade), or the writer becomes a reader (a downgrade). The grant moves to another
--   lease id, so late requests of the old lease change nothing. The script never shortens a ttl.
--   An upgrade does not change the queue. A downgrade also grants the key to the readers at the head of the queue. A
--   writer at the head keeps its place.
-- KEYS: [1] fence counter, [2 .. n+1] lock keys, [n+2 .. 2n+1] their queues
-- ARGV: [1] holder, then for each lock key: old lease id, lease id, ttl in ms, and the new mode: empty for a writer,
--   `r` for a reader. Last, on a Cluster: the start of the server's shard channels, to which the script appends a
--   holder.
-- Returns: for one lock key its result, for several keys an array of results. A result is a string: changed, the µs
--   part of the new token; 0: the old lease does not hold the key; another number: other readers hold the key, too, ms
--   until all have ended; an array of a string: another lease holds the key, the key's value; an error FOREIGN and a
--   type: the key holds no shares of this library; any other error: refused.
local counter, holder, n = KEYS[1], ARGV[1], math.floor((#KEYS - 1) / 2)
local shard = ARGV[4 * n + 2]
local time = redis.call('TIME')
local now = string.format('%010d%06d', time[1], time[2])
local results, result, micros, used, head, tail, refused = n > 1 and {}, nil, nil, nil, nil, nil, nil
-- part: shares.lua
-- part: serve.lua
local reader = use_shares().share_of('r')
for i = 1, n do
  local key, queue = KEYS[i + 1], KEYS[n + i + 1]
  local from, lease, ttl = ARGV[4 * i - 2], ARGV[4 * i - 1], tonumber(ARGV[4 * i])
  local share, set, left = ARGV[4 * i + 1] == 'r' and reader or nil, nil, nil
  -- part: stored.lua
  result = value or 0
  if value and value.err then
    if not share and string.sub(value.err, 1, 9) == 'WRONGTYPE' then
      set = shares.look(key)
      if not set or set.err then
        result = set or 0
      else
        local ends = redis.pcall('ZSCORE', key, shares.members_of(reader, from, holder)[1])
        if type(ends) ~= 'string' then
          result = ends or 0
        elseif set.used > 1 then
          result = shares.wait_for(key, share, set)
        else
          left = math.ceil(ends) - shares.now_ms
        end
      end
    end
  elseif value and share and string.sub(value, 1, 36) == 'lh1 ' .. from then
    left = redis.pcall('PTTL', key)
  elseif value then
    result = { value }
  end
  if left then
    -- part: count.lua
    if type(left) == 'number' then ttl = math.max(left, ttl) end
    -- This write has no effect on the outcome. But once a script has written, Redis accepts its further writes even if
    -- the memory is full.
    local written = refused
    if not written and set then
      written = redis.pcall('PEXPIREAT', key, set.ends + 1000)
    elseif not written then
      written = redis.pcall('PEXPIRE', key, ttl)
    end
    -- The counter is written first, so the new lease has no token beyond the counter.
    if type(written) ~= 'table' then written = redis.pcall('ZADD', counter, micros, 't') end
    result = written
    if type(written) ~= 'table' then
      used, result = micros, micros
      if share then
        redis.pcall('DEL', key)
        set = shares.give(key, share, lease, holder, ttl, set)
        if set.err then
          result = set
        elseif redis.pcall('ZCARD', queue) ~= 0 then
          -- part: count.lua
          local _, last = serve(key, queue, micros, set)
          if last then used, head, tail = last, nil, nil end
        end
      else
        local more = redis.pcall('ZCARD', queue) ~= 0 and ' +' or ''
        written = redis.pcall('SET', key, 'lh1 ' .. lease .. ' ' .. micros .. ' ' .. holder .. more, 'PX', ttl)
        if written.err then result = written end
      end
    end
  end
  if result == 0 or type(result) == 'table' and not result.err then
    -- part: primary.lua
  end
  if results then results[i] = result end
end
return results or result
