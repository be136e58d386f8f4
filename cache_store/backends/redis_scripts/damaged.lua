-- ARGV: scope, keys. Takes those of these pages away that are not what they should be, and counts them; how many.
whatever_the_memory()
local generation, keys, gone = current(ARGV[1]), split(ARGV[2], KEY), 0
local metas = generation and values_of(INDEX .. generation, keys) or {}
for at, key in ipairs(keys) do
  if metas[at] and is_damaged(generation, key, metas[at]) then
    drop_damaged(generation, key)
    gone = gone + 1
  end
end
return gone
