-- Purpose: define a function that publishes the message `<start of the lease> <hint> <key>` for each of the waiters
--   `hinted` that does not poll. A part of lua/serve.lua and lua/release.lua.
-- KEYS: those of the script
-- ARGV: those of the script
-- Returns: nothing; sets `hint_waiters`
local function hint_waiters(key, hinted, hint)
  for _, waiter in ipairs(hinted) do
    local start, holder = string.match(#waiter <= 256 and waiter or '', '^(%x+),[1-9]%d*[rp]?[%d/]*,(%S+)$')
    if start then
      local message = string.sub(start, 1, 16) .. ' ' .. hint .. ' ' .. key
      -- part: channel.lua
      -- part: publish.lua
    end
  end
end
