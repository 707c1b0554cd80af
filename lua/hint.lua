-- Purpose: publish the message `<start of the lease> <hint> <key>` for each entry in `hinted` whose waiter does not
--   poll. A part of lua/near.lua, lua/roll_call.lua and lua/serve.lua.
-- KEYS: those of the script
-- ARGV: those of the script
-- Returns: nothing
for _, waiter in ipairs(hinted) do
  local start, holder = string.match(#waiter <= 256 and waiter or '', '^(%x+),[1-9]%d*[rp]?[%d/]*,(%S+)$')
  if start then
    local message = string.sub(start, 1, 16) .. ' ' .. hint .. ' ' .. key
    -- part: channel.lua
    -- part: publish.lua
  end
end
