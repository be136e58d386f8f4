-- ARGV: tenant, model, revision; each `=` and the value, or empty for any. Ends the generations of the scopes that fit.
-- Their leases end, and their anchors go. Pages and bytes that are no longer visible.
whatever_the_memory()
local pages, bytes, ended, all = 0, 0, {}, call('HGETALL', INFO)
for at = 1, #all, 2 do
  local scope, fits = all[at], true
  local has = { struct.unpack('<I4c0I4c0I4c0', all[at + 1]) }
  for number = 1, 3 do
    fits = fits and (ARGV[number] == '' or ARGV[number] == '=' .. has[number])
  end
  if fits then
    local generation = current(scope)
    if generation then
      local held = call('HMGET', GENERATION .. generation, 'pages', 'bytes')
      pages, bytes = pages + held[1], bytes + held[2]
      local tick = call('HINCRBY', root, 'tick', 1)
      call('HDEL', SCOPES, scope)
      ended[generation] = true
      if tonumber(held[1]) > 0 then
        call('ZADD', DEAD, tick, generation)
        call('ZADD', TENANT_DEAD .. has[1], tick, generation)
      else
        call('UNLINK', GENERATION .. generation)
      end
      for _, slot in ipairs(call('SMEMBERS', SLOTS .. generation)) do
        call('UNLINK', ANCHORS .. generation .. slot, AGES .. generation .. slot, USES .. generation .. slot)
      end
      call('UNLINK', SLOTS .. generation)
    end
    call('HINCRBY', EPOCHS, scope, 1)
  end
end
for _, lease in ipairs(call('ZRANGE', LEASES, 0, -1)) do
  if ended[lease:sub(1, 8)] then
    call('ZREM', LEASES, lease)
    call('HDEL', LEASED, lease:sub(1, 8 + KEY))
    call('HDEL', HOLDER .. lease:sub(9 + KEY), lease:sub(1, 8 + KEY))
  end
end
return { pages, bytes }
