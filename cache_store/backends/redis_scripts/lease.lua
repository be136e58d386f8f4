-- ARGV: scope, keys, holder, time to live in ms (-1: until released). How many of the pages are there to keep.
whatever_the_memory()
end_leases()
local generation, keys, holder, ttl = current(ARGV[1]), split(ARGV[2], KEY), ARGV[3], tonumber(ARGV[4])
if not generation then
  return 0
end
local metas, kept = values_of(INDEX .. generation, keys), 0
local expiry = ttl < 0 and 'inf' or now_ms() + ttl
for at, key in ipairs(keys) do
  if metas[at] then
    local member = generation .. key
    local before = call('HGET', HOLDER .. holder, member)
    if not before and call('HINCRBY', LEASED, member, 1) == 1 then
      keep_from_eviction(generation, key)
    end
    if not before or tonumber(before) < tonumber(expiry) then
      call('HSET', HOLDER .. holder, member, expiry)
      call('ZADD', LEASES, expiry, member .. holder)
    end
    kept = kept + 1
  end
end
return kept
