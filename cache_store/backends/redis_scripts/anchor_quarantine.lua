-- ARGV: scope, slot, identity. Takes an anchor away and counts it; 1 if it was there.
whatever_the_memory()
local generation, slot, identity = current(ARGV[1]), ARGV[2], ARGV[3]
if not generation then
  return 0
end
call('ZREM', AGES .. generation .. slot, identity)
call('HDEL', USES .. generation .. slot, identity)
local there = call('HDEL', ANCHORS .. generation .. slot, identity)
call('HINCRBY', root, 'quarantined', there)
return there
