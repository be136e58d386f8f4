-- ARGV: scope, generation. The number of flushes, if that is still what lookups of the scope see; else nothing. Comes
-- after plain commands that looked into the generation: no other ever gets its id, so they saw what was current too.
-- Without `store.lua`, as it takes longer to run than this.
local root, call = KEYS[1], redis.call
-- Says so if the server is a read-only replica.
call('HDEL', root, '')
local known = call('HMGET', root, 'layout', 'flushes', 'pending', 'server')
if known[1] == LAYOUT and not known[3] and not is_other_server(known[4]) and call('HGET', root .. ':scopes', ARGV[1]) == ARGV[2] then
  local pages = call('HGET', root .. ':g:' .. ARGV[2], 'pages')
  if pages and tonumber(pages) == call('HLEN', root .. ':i:' .. ARGV[2]) then
    return known[2]
  end
end
return false
