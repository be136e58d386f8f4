-- ARGV: scope, tenant, info, id for a new generation, slot, identity, capacity, budget, data.
-- 1 if it was stored, then the identities that had to go: of the five oldest the one used least, until it fits.
local slot, identity, capacity, budget, data = ARGV[5], ARGV[6], tonumber(ARGV[7]), tonumber(ARGV[8]), ARGV[9]
if #data > budget or capacity < 1 then
  return { 0 }
end
-- The first write: one that a server without memory refuses.
local tick = call('HINCRBY', root, 'tick', 1)
make_store()
local generation = make_current(ARGV[1], ARGV[2], ARGV[3], ARGV[4])
local pool, ages, uses = ANCHORS .. generation .. slot, AGES .. generation .. slot, USES .. generation .. slot
call('SADD', SLOTS .. generation, slot)

local held = 0
for _, other in ipairs(call('ZRANGE', ages, 0, -1)) do
  if other ~= identity then
    held = held + call('HSTRLEN', pool, other)
  end
end

local function least_used()
  local chosen, fewest, seen = nil, math.huge, 0
  for _, other in ipairs(call('ZRANGE', ages, 0, 5)) do
    if other ~= identity and seen < 5 then
      seen = seen + 1
      local used = tonumber(call('HGET', uses, other) or 0)
      if used < fewest then
        chosen, fewest = other, used
      end
    end
  end
  return chosen
end

local result, others = { 1 }, call('ZCARD', ages) - (call('ZSCORE', ages, identity) and 1 or 0)
while others > 0 and (others + 1 > capacity or held + #data > budget) do
  local gone = least_used()
  held, others = held - call('HSTRLEN', pool, gone), others - 1
  call('HDEL', pool, gone)
  call('HDEL', uses, gone)
  call('ZREM', ages, gone)
  result[#result + 1] = gone
end
call('HSET', pool, identity, data)
call('ZADD', ages, 'NX', tick, identity)
return result
