-- ARGV: holder. Ends its leases; of how many pages.
whatever_the_memory()
end_leases()
local members = call('HKEYS', HOLDER .. ARGV[1])
call('UNLINK', HOLDER .. ARGV[1])
for _, member in ipairs(members) do
  call('ZREM', LEASES, member .. ARGV[1])
  unpin(member)
end
return #members
