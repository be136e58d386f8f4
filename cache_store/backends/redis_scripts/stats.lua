-- Bytes, leased pages, quarantined; then per scope: scope, info, epoch, pages, bytes.
whatever_the_memory()
end_leases()
local sums = call('HMGET', root, 'bytes', 'quarantined')
local result = { tonumber(sums[1] or 0), call('HLEN', LEASED), tonumber(sums[2] or 0) }
local all = call('HGETALL', INFO)
for at = 1, #all, 2 do
  local generation, held = current(all[at]), { false, false }
  if generation then
    held = call('HMGET', GENERATION .. generation, 'pages', 'bytes')
  end
  local epoch = tonumber(call('HGET', EPOCHS, all[at]) or 0)
  for _, value in ipairs({ all[at], all[at + 1], epoch, tonumber(held[1] or 0), tonumber(held[2] or 0) }) do
    result[#result + 1] = value
  end
end
return result
