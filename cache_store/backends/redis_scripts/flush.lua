-- ARGV: number of the flush ('': begin one), tenant, model, revision; each `=` and the value, or empty for any. Begins a
-- flush, or goes on with it: asks some scopes, then ends leases, in as many runs as it takes. It is seen whole after the
-- first. Its number ('' if others must be finished first), whether it is done, pages and bytes that became invisible.
whatever_the_memory()
local number = ARGV[1]
if number == '' and pending < FLUSHES_AT_ONCE then
  number_flushes()
  call('HINCRBY', root, 'flushes', 1)
  number = call('HGET', root, 'flushes')
  if layout then
    local wants = { ARGV[2], ARGV[3], ARGV[4] }
    for at = 1, 3 do
      wants[at] = struct.pack('<I4c0', #wants[at], wants[at])
    end
    call('HSET', FLUSHES, number, table.concat(wants))
    pending = call('HLEN', FLUSHES)
    call('HSET', root, 'pending', pending)
  end
end
if layout and pending > 0 then
  sweep()
end
local gone = call('HMGET', FLUSHED .. number, 'pages', 'bytes')
local done = number ~= '' and call('HEXISTS', FLUSHES, number) == 0
if done then
  call('UNLINK', FLUSHED .. number)
else
  -- If nobody comes for it.
  call('PEXPIRE', FLUSHED .. number, 3600000)
end
return { number, done and 1 or 0, tonumber(gone[1] or 0), tonumber(gone[2] or 0) }
