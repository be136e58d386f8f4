-- ARGV: scope, tenant, info, id for a new generation, budget, tenant's budget, tick of the call (-1: this is all of it),
-- tick with which the first of these pages is stored, after that; number of flushes ('': any) without which nothing is
-- stored; then per page key, index entry. The data of the n-th page lies at STAGED .. n: put there in the same
-- transaction, it does not come through Lua, which is slow at that.
-- Pages done (fewer than given: it is more work than one run may do; come again), stored, bytes, refused (full, quota,
-- too large, collision, flushed), evicted pages, evicted bytes, damaged pages that were taken away, tick of the call,
-- generation.
local FIRST = 10
local scope, tenant = ARGV[1], ARGV[2]
local budget, quota, first, offset = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local number = (#ARGV - FIRST + 1) / 2
local STAGED = root .. ':x:' .. ARGV[4]
local function clear()
  for place = 1, number do
    call('UNLINK', STAGED .. place)
  end
end
if ARGV[9] ~= '' and ARGV[9] ~= number_flushes() then
  clear()
  return { number, 0, 0, 0, 0, 0, 0, number, 0, 0, 0, math.max(first, 0), '' }
end
-- The first write: one that a server without memory refuses.
local tick = call('HINCRBY', root, 'tick', first < 0 and 2 * number or 0)
make_store()
end_leases()
local generation = make_current(scope, tenant, ARGV[3], ARGV[4])
local index = INDEX .. generation

if first < 0 then
  first, offset = tick - 2 * number, number
  local keys = {}
  for at = FIRST, #ARGV, 2 do
    keys[#keys + 1] = ARGV[at]
  end
  touch(generation, keys, first)
end

local evicted_pages, evicted_bytes = 0, 0
local function room(grows, limit, taken, dead, leaves)
  local done, pages, bytes = make_room(taken + grows - limit, dead, leaves, first + 1)
  evicted_pages, evicted_bytes = evicted_pages + pages, evicted_bytes + bytes
  return done
end

-- Takes about as long as to put so many bytes together, for each whose checksum is worked out.
local CHECKING = 40
local merged_bytes, damaged = 0, 0

-- What the index has of the page, if that is as it was written.
local function find(key, meta)
  local old = call('HGET', index, key)
  if old and old ~= meta then
    trust(meta)
    if not is_whole(old) or (form_of(old) ~= form_of(meta) and is_damaged(generation, key, old)) then
      drop_damaged(generation, key)
      damaged = damaged + 1
      return nil
    end
  end
  return old
end

local function put(key, meta, staged, used)
  if merged_bytes + CHECKING * checked_bytes > MERGED_BYTES then
    return 'more'
  end
  local old, data = find(key, meta), nil
  if old and old:sub(1, DIGEST) ~= meta:sub(1, DIGEST) then
    return 'collision'
  end
  if old and form_of(old) ~= form_of(meta) then
    merged_bytes = merged_bytes + footprint(old) + footprint(meta)
    local records = parts_of(old, call('GET', PAGE .. generation .. key))
    for name, bytes in pairs(parts_of(meta, call('GET', staged))) do
      records[name] = bytes
    end
    meta, data = joined(old:sub(1, AGAIN_ENDS), records)
  end
  if old then
    -- A page keeps the parent that it is counted for.
    meta = old:sub(1, AGAIN_ENDS) .. form_of(meta)
  end
  local size, before = footprint(meta), old and footprint(old) or 0
  if size > budget or size > quota then
    return 'too_large'
  end
  local done = room(size - before, quota, tonumber(call('HGET', TENANTS, tenant) or 0), TENANT_DEAD .. tenant,
    TENANT_LEAVES .. tenant)
  if done ~= true then
    return done or 'quota'
  end
  done = room(size - before, budget, tonumber(call('HGET', root, 'bytes') or 0), DEAD, LEAVES)
  if done ~= true then
    return done or 'full'
  end
  if data then
    call('SET', PAGE .. generation .. key, data)
  else
    call('RENAME', staged, PAGE .. generation .. key)
    call('PERSIST', PAGE .. generation .. key)
  end
  call('HSET', index, key, meta)
  call('HSET', USED .. generation, key, used)
  count(generation, tenant, old and 0 or 1, size - before)
  if not old then
    local parent = parent_of(meta)
    if call('HINCRBY', KIDS .. generation, parent, 1) == 1 then
      keep_from_eviction(generation, parent)
    end
  end
  let_be_evicted(generation, key)
  return 'stored'
end

local outcomes = { stored = 0, full = 0, quota = 0, too_large = 0, collision = 0 }
local stored_bytes, done = 0, 0
for at = FIRST, #ARGV, 2 do
  local staged, outcome = STAGED .. (done + 1), nil
  local size = data_size(ARGV[at + 1])
  outcome = put(ARGV[at], ARGV[at + 1], staged, first + offset + done + 1)
  if outcome == 'more' then
    break
  end
  outcomes[outcome] = outcomes[outcome] + 1
  if outcome == 'stored' then
    stored_bytes = stored_bytes + size
  end
  done = done + 1
end
clear()
return {
  done, outcomes.stored, stored_bytes, outcomes.full, outcomes.quota, outcomes.too_large, outcomes.collision, 0,
  evicted_pages, evicted_bytes, damaged, first, generation,
}
