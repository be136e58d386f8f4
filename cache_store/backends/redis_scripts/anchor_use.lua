-- ARGV: scope, slot, identities. Counts one use of each that is there.
whatever_the_memory()
local generation = current(ARGV[1])
for at = 3, generation and #ARGV or 0 do
  if call('ZSCORE', AGES .. generation .. ARGV[2], ARGV[at]) then
    call('HINCRBY', USES .. generation .. ARGV[2], ARGV[at], 1)
  end
end
return 1
