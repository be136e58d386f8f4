-- ARGV: keys of this store that may belong to nothing any more. Deletes those; how many pages, and their bytes.
whatever_the_memory()
local pages, bytes = 0, 0
for _, key in ipairs(ARGV) do
  local kind, generation, rest = key:sub(#root + 2, #root + 2), key:sub(#root + 4, #root + 11), key:sub(#root + 12)
  if not tenant_of(generation) or (kind == 'p' and call('HEXISTS', INDEX .. generation, rest) == 0) then
    if kind == 'p' then
      pages, bytes = pages + 1, bytes + call('STRLEN', key)
    end
    call('UNLINK', key)
  end
end
return { pages, bytes }
