-- ARGV: scope, generation ('' for the current one), cursor. Part of a scope's index: generation, cursor, keys and entries.
whatever_the_memory()
local generation = current(ARGV[1])
if not generation or (ARGV[2] ~= '' and ARGV[2] ~= generation) then
  return { '', '0', {} }
end
local found = call('HSCAN', INDEX .. generation, ARGV[3], 'COUNT', 500)
return { generation, found[1], found[2] }
