-- ARGV: scope, slot. The generation, and identity and data of each anchor of the pool, the oldest first.
whatever_the_memory()
local generation = current(ARGV[1])
local result = { generation or '' }
if generation then
  for _, identity in ipairs(call('ZRANGE', AGES .. generation .. ARGV[2], 0, -1)) do
    local data = call('HGET', ANCHORS .. generation .. ARGV[2], identity)
    if data then
      result[#result + 1] = identity
      result[#result + 1] = data
    end
  end
end
return result
