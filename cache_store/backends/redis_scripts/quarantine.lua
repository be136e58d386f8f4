-- ARGV: scope, key, name. Takes a record away and counts it; the whole page if what it has cannot be told. 1 if it was
-- there, 2 if all of the page went.
whatever_the_memory()
local generation, key, name = current(ARGV[1]), ARGV[2], ARGV[3]
local meta = generation and call('HGET', INDEX .. generation, key)
if not meta then
  return 0
end
if is_damaged(generation, key, meta) then
  drop_damaged(generation, key)
  return 2
end
local page = PAGE .. generation .. key
local records = parts_of(meta, call('GET', page))
if not records[name] then
  return 0
end
records[name] = nil
call('HINCRBY', root, 'quarantined', 1)
local kept, data = joined(meta:sub(1, AGAIN_ENDS), records)
call('SET', page, data)
call('HSET', INDEX .. generation, key, kept)
count(generation, tenant_of(generation), 0, footprint(kept) - footprint(meta))
return 1
