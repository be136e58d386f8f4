-- ARGV: scope, keys, tick before that of the first ('': the next ones), number of flushes ('': any; else it does nothing
-- after another one). Marks pages as used, the later in the list the more recently.
whatever_the_memory()
if ARGV[4] ~= '' and ARGV[4] ~= number_flushes() then
  return 0
end
local generation, keys = current(ARGV[1]), split(ARGV[2], KEY)
if generation then
  touch(generation, keys, tonumber(ARGV[3]) or call('HINCRBY', root, 'tick', #keys) - #keys)
end
return 1
