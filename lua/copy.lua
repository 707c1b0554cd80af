-- Purpose: read the copy of a fenced value under `key`, up to the byte `last`. A part of lua/read_copy.lua and
--   lua/write_copy.lua.
-- KEYS: those of the script
-- ARGV: those of the script
-- Returns: nothing; `found` is the copy, '' if the key is missing, an error FOREIGN and a type, or another error
local digit = '%d'
local form = '^lhv1 ' .. digit:rep(16) .. ' ' .. digit:rep(20) .. ' ' .. digit:rep(16) .. ' ' .. digit:rep(20) .. ' [+-]'
local found = redis.pcall('GETRANGE', key, '0', string.format('%.0f', last))
if found.err then
  if string.sub(found.err, 1, 9) == 'WRONGTYPE' then
    found = { err = 'FOREIGN ' .. (redis.pcall('TYPE', key).ok or 'value of another type') }
  end
elseif found == '' then
  -- GETRANGE returns '' for a missing key, too.
  local exists = redis.pcall('EXISTS', key)
  if exists ~= 0 then found = exists == 1 and { err = 'FOREIGN string' } or exists end
elseif not string.find(found, form) then
  found = { err = 'FOREIGN string' }
end
