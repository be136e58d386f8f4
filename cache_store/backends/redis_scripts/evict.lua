-- ARGV: bytes to free, tick (leaves used before it may go). Pages and bytes that went, and whether there is more (1).
whatever_the_memory()
end_leases()
local done, pages, bytes = make_room(tonumber(ARGV[1]), DEAD, LEAVES, tonumber(ARGV[2]))
return { pages, bytes, done == 'more' and 1 or 0 }
