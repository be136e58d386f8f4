-- ARGV: scope, keys. The generation, the number of flushes, and what the index knows of each page.
whatever_the_memory()
local generation, keys = current(ARGV[1]), split(ARGV[2], KEY)
if not generation then
  return { '', number_flushes(), {} }
end
return { generation, number_flushes(), values_of(INDEX .. generation, keys) }
