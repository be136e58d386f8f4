-- ARGV: scope, keys. The generation, and what its index knows of each page: lengths (4 bytes each, 0 for none), entries.
whatever_the_memory()
local generation, keys = current(ARGV[1]), split(ARGV[2], KEY)
if not generation then
  return { '', string.rep('\0\0\0\0', #keys), '' }
end
local metas, lengths, entries = values_of(INDEX .. generation, keys), {}, {}
for at = 1, #keys do
  local meta = metas[at]
  lengths[at] = meta and struct.pack('<I4', #meta) or '\0\0\0\0'
  entries[#entries + 1] = meta or nil
end
touch(generation, keys, metas, call('HINCRBY', root, 'tick', #keys) - #keys)
return { generation, table.concat(lengths), table.concat(entries) }
