-- ARGV: cursor ('': no scopes any more). Where to go on, whether to (1), bytes, leased pages, quarantined; then of some
-- scopes: scope, info, epoch, pages, bytes.
whatever_the_memory()
local ended, found = end_leases(), { '', {} }
if ARGV[1] ~= '' then
  found = call('HSCAN', INFO, ARGV[1], 'COUNT', SCOPES_AT_ONCE)
end
local result = { '', 0, 0, 0, 0 }
for at = 1, #found[2], 2 do
  local scope = found[2][at]
  local generation, held = current(scope), { false, false }
  if generation then
    held = call('HMGET', GENERATION .. generation, 'pages', 'bytes')
  end
  local epoch = tonumber(call('HGET', EPOCHS, scope) or 0)
  for _, value in ipairs({ scope, found[2][at + 1], epoch, tonumber(held[1] or 0), tonumber(held[2] or 0) }) do
    result[#result + 1] = value
  end
end
local sums = call('HMGET', root, 'bytes', 'quarantined')
result[1] = found[1] == '0' and '' or found[1]
-- Leases that ended and are still counted are another reason to go on.
result[2] = (result[1] ~= '' or ended == LEASES_AT_ONCE) and 1 or 0
result[3], result[4], result[5] = tonumber(sums[1] or 0), call('HLEN', LEASED), tonumber(sums[2] or 0)
return result
