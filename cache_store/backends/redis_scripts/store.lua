-- Stands before every script: the store's keys, and how a page comes and goes.
--
-- KEYS[1] is the root, `{name}`; every other key starts with it, so a store lies on one shard of a cluster. A generation
-- is what a scope holds between two flushes; its random id (8 bytes) is part of its keys, so that nothing of a flushed
-- one can be mistaken for what came later. A member, in the sorted sets, is generation .. key.
--
--   {name}              layout, bytes, tick (the logical clock), quarantined
--   :scopes             scope -> current generation         :epochs  scope -> number of flushes
--   :info               scope -> tenant, model, revision    :tenants tenant -> bytes
--   :g:<generation>     scope, tenant, pages, bytes
--   :i:<generation>     key -> digest (32), parent (16), count of records (2), bytes of their names (4), names, ends
--   :u:<generation>     key -> tick of its last use         :k:<generation> parent -> number of stored children
--   :p:<generation><key>  the records, one after the other; :x: such data for an instant, until its publish is decided
--   :l, :t:<tenant>     members that may be evicted, by last use: without stored children, without leases
--   :d, :d:<tenant>     flushed generations that still take space
--   :e                  leases by expiry (ms): member .. holder
--   :lp                 member -> number of its leases      :h:<holder> member -> expiry
--   :s:<generation>     slots of anchor pools; :a: their data, :o: by age, :c: uses, each .. <generation><slot>
local root, call = KEYS[1], redis.call
local DIGEST, KEY, COUNT_AT, NAMES_AT = 32, 16, 49, 55
local INDEX, USED, KIDS, PAGE = root .. ':i:', root .. ':u:', root .. ':k:', root .. ':p:'
local GENERATION, LEAVES, TENANT_LEAVES = root .. ':g:', root .. ':l', root .. ':t:'
local DEAD, TENANT_DEAD, SCOPES, TENANTS = root .. ':d', root .. ':d:', root .. ':scopes', root .. ':tenants'
local EPOCHS, INFO = root .. ':epochs', root .. ':info'
local LEASES, LEASED, HOLDER = root .. ':e', root .. ':lp', root .. ':h:'
local SLOTS, ANCHORS, AGES, USES = root .. ':s:', root .. ':a:', root .. ':o:', root .. ':c:'
-- Pages that one run of a script may take away, so that none holds up the server's other clients.
local work = WORK_PAGES

local layout = call('HGET', root, 'layout')
if layout and layout ~= LAYOUT then
  return redis.error_reply('CROSSFILLLAYOUT ' .. layout)
end

-- A server without memory refuses a script's first write if it could grow, and none after it. What must also work then
-- (to read, to take away) makes a write first that changes nothing; what stores lets itself be refused, whole.
local function whatever_the_memory()
  call('HDEL', root, '')
end

-- Keys that were lost (evicted by the server, deleted by hand) leave sums that nobody can put right: the store begins
-- anew, empty. What is left of the old one belongs to generations without a name, and `compact` deletes it.
local function begin_anew()
  local lost = call('HVALS', SCOPES)
  for _, dead in ipairs(call('ZRANGE', DEAD, 0, -1)) do
    lost[#lost + 1] = dead
  end
  for _, generation in ipairs(lost) do
    call('UNLINK', GENERATION .. generation, INDEX .. generation, USED .. generation, KIDS .. generation)
  end
  for _, tenant in ipairs(call('HKEYS', TENANTS)) do
    call('UNLINK', TENANT_LEAVES .. tenant, TENANT_DEAD .. tenant)
  end
  -- The clock goes on: a publish that is under way holds a time of it.
  local tick = call('HGET', root, 'tick') or 0
  call('UNLINK', root, SCOPES, EPOCHS, INFO, TENANTS, LEAVES, DEAD, LEASES, LEASED)
  call('HSET', root, 'layout', LAYOUT, 'tick', tick)
  layout = LAYOUT
end

local function begin_anew_because(reason)
  redis.log(redis.LOG_WARNING, 'crossfill: the store ' .. root .. ' begins anew: ' .. reason)
  begin_anew()
end

local function make_store()
  if not layout then
    begin_anew()
  end
end

local function split(blob, size)
  local parts = {}
  for at = 1, #blob, size do
    parts[#parts + 1] = blob:sub(at, at + size - 1)
  end
  return parts
end

-- Lua's stack is bounded, so long argument lists go in pieces; most are short.
local PIECE = 2000
local function call_in_pieces(values, ...)
  local head = { ... }
  if #values <= PIECE and #head == 2 then
    call(head[1], head[2], unpack(values))
    return
  end
  for first = 1, #values, PIECE do
    local arguments = { unpack(head) }
    for at = first, math.min(first + PIECE - 1, #values) do
      arguments[#arguments + 1] = values[at]
    end
    call(unpack(arguments))
  end
end

local function values_of(hash, fields)
  if #fields <= PIECE then
    return #fields > 0 and call('HMGET', hash, unpack(fields)) or {}
  end
  local found = {}
  for first = 1, #fields, PIECE do
    for _, value in ipairs(call('HMGET', hash, unpack(fields, first, math.min(first + PIECE - 1, #fields)))) do
      found[#found + 1] = value
    end
  end
  return found
end

local function footprint(meta)
  return struct.unpack('<I4', meta, #meta - 3) + PAGE_OVERHEAD
end

-- Of a generation that a scope has or had; of any other (left behind when keys were lost) nothing is known.
local tenants = {}
local function tenant_of(generation)
  if tenants[generation] == nil then
    local known = call('HMGET', GENERATION .. generation, 'tenant', 'scope')
    local named = known[2] and (call('HGET', SCOPES, known[2]) == generation or call('ZSCORE', DEAD, generation))
    tenants[generation] = named and known[1] or false
  end
  return tenants[generation]
end

local function count(generation, tenant, pages, bytes)
  if pages ~= 0 then
    call('HINCRBY', GENERATION .. generation, 'pages', pages)
  end
  call('HINCRBY', GENERATION .. generation, 'bytes', bytes)
  call('HINCRBY', root, 'bytes', bytes)
  if call('HINCRBY', TENANTS, tenant, bytes) <= 0 then
    call('HDEL', TENANTS, tenant)
  end
end

-- The generation of a scope that lookups see, or nil.
local function current(scope)
  local generation = layout and call('HGET', SCOPES, scope)
  if generation then
    local pages = call('HGET', GENERATION .. generation, 'pages')
    if pages and tonumber(pages) == call('HLEN', INDEX .. generation) then
      return generation
    end
    begin_anew_because('an index does not have as many pages as were counted')
  elseif layout and call('EXISTS', SCOPES, DEAD) == 0 and tonumber(call('HGET', root, 'bytes') or 0) > 0 then
    begin_anew_because('its scopes are gone')
  end
  return nil
end

-- Scopes stay known without pages, for their epochs; beyond a number, those that hold nothing are forgotten by and by.
local function forget_some_scopes()
  if call('HLEN', INFO) <= MAX_SCOPES then
    return
  end
  local found = call('HSCAN', INFO, call('HGET', root, 'sweep') or '0', 'COUNT', 50)
  call('HSET', root, 'sweep', found[1])
  for at = 1, #found[2], 2 do
    local scope = found[2][at]
    local generation = call('HGET', SCOPES, scope)
    if not generation or call('EXISTS', INDEX .. generation, SLOTS .. generation) == 0 then
      call('HDEL', SCOPES, scope)
      call('HDEL', INFO, scope)
      call('HDEL', EPOCHS, scope)
      call('UNLINK', GENERATION .. (generation or ''))
    end
  end
end

local function make_current(scope, tenant, info, fresh)
  local generation = current(scope)
  if not generation then
    forget_some_scopes()
    generation = fresh
    call('HSET', SCOPES, scope, generation)
    call('HSET', GENERATION .. generation, 'scope', scope, 'tenant', tenant, 'pages', 0, 'bytes', 0)
    call('HSETNX', INFO, scope, info)
    call('HSETNX', EPOCHS, scope, 0)
    tenants[generation] = tenant
  end
  return generation
end

-- Marks pages as used, the later in the list the more recently.
local function touch(generation, keys, metas, first_tick)
  local used, scored, number = {}, { 'XX' }, 0
  for at = 1, #keys do
    if metas[at] then
      local tick = first_tick + at
      used[2 * number + 1], used[2 * number + 2] = keys[at], tick
      scored[2 * number + 2], scored[2 * number + 3] = tick, generation .. keys[at]
      number = number + 1
    end
    if number == PIECE / 2 or (number > 0 and at == #keys) then
      call('HSET', USED .. generation, unpack(used))
      call('ZADD', LEAVES, unpack(scored))
      call('ZADD', TENANT_LEAVES .. tenant_of(generation), unpack(scored))
      used, scored, number = {}, { 'XX' }, 0
    end
  end
end

local function let_be_evicted(generation, key)
  local tenant, member = tenant_of(generation), generation .. key
  if tenant and call('HEXISTS', INDEX .. generation, key) == 1 and call('HEXISTS', KIDS .. generation, key) == 0
      and call('HEXISTS', LEASED, member) == 0 and not call('ZSCORE', TENANT_DEAD .. tenant, generation) then
    local tick = call('HGET', USED .. generation, key) or 0
    call('ZADD', LEAVES, tick, member)
    call('ZADD', TENANT_LEAVES .. tenant, tick, member)
  end
end

local function keep_from_eviction(generation, key)
  call('ZREM', LEAVES, generation .. key)
  call('ZREM', TENANT_LEAVES .. (tenant_of(generation) or ''), generation .. key)
end

-- Takes a page out of everything; how many bytes that gave.
local function drop_page(generation, key)
  local meta, tenant = call('HGET', INDEX .. generation, key), tenant_of(generation)
  keep_from_eviction(generation, key)
  if not meta or not tenant then
    return 0
  end
  local size, parent = footprint(meta), meta:sub(DIGEST + 1, DIGEST + KEY)
  call('HDEL', INDEX .. generation, key)
  call('HDEL', USED .. generation, key)
  call('HDEL', LEASED, generation .. key)
  call('UNLINK', PAGE .. generation .. key)
  count(generation, tenant, -1, -size)
  if call('HINCRBY', KIDS .. generation, parent, -1) <= 0 then
    call('HDEL', KIDS .. generation, parent)
    let_be_evicted(generation, parent)
  end
  return size
end
