-- Stands before the scripts that make room: what ends by itself, what was flushed, and what was used least recently.

local function now_ms()
  local now = call('TIME')
  return now[1] * 1000 + math.floor(now[2] / 1000)
end

local function unpin(member)
  local leases = tonumber(call('HGET', LEASED, member) or 0)
  if leases > 1 then
    call('HINCRBY', LEASED, member, -1)
  else
    call('HDEL', LEASED, member)
    let_be_evicted(member:sub(1, 8), member:sub(9))
  end
end

local function end_leases()
  local ended = call('ZRANGEBYSCORE', LEASES, '-inf', now_ms(), 'LIMIT', 0, LEASES_AT_ONCE)
  for _, lease in ipairs(ended) do
    local member, holder = lease:sub(1, 8 + KEY), lease:sub(9 + KEY)
    call('ZREM', LEASES, lease)
    call('HDEL', HOLDER .. holder, member)
    unpin(member)
  end
  if call('EXISTS', LEASES) == 0 and call('EXISTS', LEASED) == 1 then
    -- Their list was lost; without it they would never end.
    local pairs_of = call('HSCAN', LEASED, '0', 'COUNT', LEASES_AT_ONCE)[2]
    for at = 1, #pairs_of, 2 do
      call('HDEL', LEASED, pairs_of[at])
      let_be_evicted(pairs_of[at]:sub(1, 8), pairs_of[at]:sub(9))
    end
  end
  return #ended
end

-- Takes pages of a flushed generation away until `excess` bytes are free, and with the last of them all that is known of
-- it. Pages and bytes.
local function reclaim_part(generation, excess)
  local tenant, cursor, pages, bytes = tenant_of(generation), '0', 0, 0
  repeat
    local found = call('HSCAN', INDEX .. generation, cursor, 'COUNT', 100)
    cursor = found[1]
    local fields, data, members = {}, {}, {}
    for at = 1, #found[2], 2 do
      local key = found[2][at]
      -- While it iterates over a table that is being resized, the server may name a key twice.
      if bytes < excess and call('HDEL', INDEX .. generation, key) == 1 then
        data[#data + 1] = PAGE .. generation .. key
        members[#members + 1] = generation .. key
        pages, bytes = pages + 1, bytes + counted(generation, key, found[2][at + 1])
      end
    end
    if #data > 0 then
      call_in_pieces(data, 'UNLINK')
      call_in_pieces(members, 'ZREM', LEAVES)
      call_in_pieces(members, 'HDEL', LEASED)
      if tenant then
        call_in_pieces(members, 'ZREM', TENANT_LEAVES .. tenant)
      end
    end
  until cursor == '0' or pages > 0
  work = work - pages
  if tenant and pages > 0 then
    count(generation, tenant, -pages, -bytes)
  end
  if call('EXISTS', INDEX .. generation) == 0 then
    local left = tonumber(call('HGET', GENERATION .. generation, 'bytes') or 0)
    if tenant and left ~= 0 then
      -- Its index was taken from outside.
      count(generation, tenant, 0, -left)
    end
    call('UNLINK', GENERATION .. generation, USED .. generation, KIDS .. generation)
    call('ZREM', DEAD, generation)
    call('ZREM', TENANT_DEAD .. (tenant or ''), generation)
  end
  return pages, bytes
end

-- Whether lookups see what a generation holds.
local living = {}
local function lives(generation)
  if living[generation] == nil then
    local scope = call('HGET', GENERATION .. generation, 'scope')
    living[generation] = scope and current(scope) == generation or false
  end
  return living[generation]
end

-- Both give where to go on, or nil after the last one.
local function sweep_scopes(cursor)
  local found, asked = call('HSCAN', INFO, cursor, 'COUNT', SCOPES_AT_ONCE), 0
  for at = 1, #found[2], 2 do
    -- A small table comes as a whole, whatever the count.
    if asked == SCOPES_AT_ONCE then
      return cursor
    end
    if call('HGET', ASKED, found[2][at]) ~= flushes_under_way()[#flushes_under_way()].number then
      asked = asked + 1
      current(found[2][at])
    end
  end
  return found[1] ~= '0' and found[1] or nil
end

local function sweep_leases(cursor)
  local found, ended = call('ZSCAN', LEASES, cursor, 'COUNT', 2 * LEASES_AT_ONCE), 0
  for at = 1, #found[2], 2 do
    local lease = found[2][at]
    if not lives(lease:sub(1, 8)) then
      call('ZREM', LEASES, lease)
      call('HDEL', LEASED, lease:sub(1, 8 + KEY))
      call('HDEL', HOLDER .. lease:sub(9 + KEY), lease:sub(1, 8 + KEY))
      ended = ended + 1
      if ended == LEASES_AT_ONCE then
        return cursor
      end
    end
  end
  return found[1] ~= '0' and found[1] or nil
end

-- Goes on with the flushes that are under way: asks some scopes, or after all of them ends some leases of what was flushed.
-- One that came while it was at it has its turn after that.
local function sweep()
  local at = call('HMGET', root, 'sweep_at', 'sweep_cursor', 'sweep_to')
  local newest = flushes_under_way()[#flushes_under_way()]
  if #flushes_under_way() ~= pending then
    begin_anew_because('a flush that was under way is gone')
    return
  end
  local phase, cursor, last = at[1] or 'scopes', at[2] or '0', at[3] or newest.number
  work = work - SCOPES_AT_ONCE
  if phase == 'scopes' then
    cursor = sweep_scopes(cursor)
  else
    cursor = sweep_leases(cursor)
  end
  if pending == 0 then
    -- The store began anew meanwhile.
    return
  end
  if cursor or phase == 'scopes' then
    call('HSET', root, 'sweep_at', cursor and phase or 'leases', 'sweep_cursor', cursor or '0', 'sweep_to', last)
    return
  end
  for _, flush in ipairs(flushes_under_way()) do
    if tonumber(flush.number) <= tonumber(last) then
      call('HDEL', FLUSHES, flush.number)
      pending = pending - 1
    end
  end
  under_way = nil
  call('HDEL', root, 'sweep_at', 'sweep_cursor', 'sweep_to')
  if pending > 0 then
    call('HSET', root, 'pending', pending)
  else
    call('HDEL', root, 'pending')
    call('UNLINK', ASKED)
  end
end

-- Frees at least `excess` bytes from what was flushed and from leaves used before the tick `before`; a damaged store that
-- has no leaf begins anew.
-- Whether it is done, or 'more' if there is more to take away than one run may; then pages and bytes.
local function make_room(excess, dead, leaves, before)
  local pages, bytes = 0, 0
  while bytes < excess do
    if work <= 0 then
      return 'more', pages, bytes
    end
    local flushed = call('ZRANGE', dead, 0, 0)[1]
    if flushed then
      local gone, size = reclaim_part(flushed, excess - bytes)
      pages, bytes = pages + gone, bytes + size
    elseif layout and pending > 0 then
      sweep()
    else
      local oldest = call('ZRANGE', leaves, 0, 0, 'WITHSCORES')
      if not oldest[1] and call('EXISTS', LEASED) == 0 and tonumber(call('HGET', root, 'bytes') or 0) > 0
          and call('EXISTS', DEAD) == 0 then
        begin_anew_because('nothing may be evicted although nothing is leased')
        return 'more', pages, bytes
      end
      if not oldest[1] or tonumber(oldest[2]) >= before then
        return false, pages, bytes
      end
      local size = drop_page(oldest[1]:sub(1, 8), oldest[1]:sub(9))
      -- A member that nothing is known of lies in this set only because its page's keys were taken from outside.
      call('ZREM', leaves, oldest[1])
      call('HDEL', LEASED, oldest[1])
      work, bytes = work - 1, bytes + size
      if size > 0 then
        pages = pages + 1
      end
    end
  end
  return true, pages, bytes
end
