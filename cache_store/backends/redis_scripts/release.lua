-- ARGV: holder, cursor. Ends some of its leases; of how many pages, where to go on, and whether that was all (1).
whatever_the_memory()
end_leases()
local now, released, done = now_ms(), 0, 0
local found = call('HSCAN', HOLDER .. ARGV[1], ARGV[2], 'COUNT', LEASES_AT_ONCE)
for at = 1, #found[2], 2 do
  -- A small table comes as a whole, whatever the count.
  if done == LEASES_AT_ONCE then
    return { released, ARGV[2], 0 }
  end
  local member, expiry = found[2][at], found[2][at + 1]
  if call('HDEL', HOLDER .. ARGV[1], member) == 1 then
    done = done + 1
    call('ZREM', LEASES, member .. ARGV[1])
    unpin(member)
    if lives(member:sub(1, 8)) and (expiry == 'inf' or tonumber(expiry) > now) then
      released = released + 1
    end
  end
end
return { released, found[1], found[1] == '0' and 1 or 0 }
