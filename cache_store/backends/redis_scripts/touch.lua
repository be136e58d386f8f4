-- ARGV: scope, keys. Marks pages as used, the later in the list the more recently.
whatever_the_memory()
local generation, keys = current(ARGV[1]), split(ARGV[2], KEY)
if generation then
  touch(generation, keys, values_of(INDEX .. generation, keys), call('HINCRBY', root, 'tick', #keys) - #keys)
end
return 1
