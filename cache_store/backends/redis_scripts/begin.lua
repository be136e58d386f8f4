-- ARGV: scope, keys. Begins a publish of several parts: marks those of its pages that are there as used, so that none
-- of them goes to make room for another, and keeps as many later ticks for when they are stored. The tick before them.
local number = #ARGV[2] / KEY
-- The first write: one that a server without memory refuses.
local first = call('HINCRBY', root, 'tick', 2 * number) - 2 * number
make_store()
local generation, keys = current(ARGV[1]), split(ARGV[2], KEY)
if generation then
  touch(generation, keys, values_of(INDEX .. generation, keys), first)
end
return first
