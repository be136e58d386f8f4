-- Stands before every script: the store's keys, and how a page comes and goes.
--
-- KEYS[1] is the root, `{name}`; every other key starts with it, so a store lies on one shard of a cluster. A generation
-- is what a scope holds between two flushes; its random id (8 bytes) is part of its keys, so that nothing of a flushed
-- one can be mistaken for what came later. A member, in the sorted sets, is generation .. key.
--
--   {name}              layout, bytes, tick (the logical clock), quarantined, flushes, server (that numbered them), and of
--                       flushes that are under way: pending (how many), sweep_at, sweep_cursor, sweep_to
--   :f                  such a flush, by its number: what it is of    :fs scope -> last flush that it was asked for
--   :r:<number>         pages and bytes that such a flush made invisible
--   :scopes             scope -> current generation         :epochs  scope -> number of flushes
--   :info               scope -> tenant, model, revision    :tenants tenant -> bytes
--   :g:<generation>     scope, tenant, pages, bytes
--   :i:<generation>     key -> entry, as `entry.lua` says
--   :u:<generation>     key -> tick of its last use         :k:<generation> parent -> number of stored children
--   :p:<generation><key>  the records, one after the other; :x: such data for an instant, until its publish is decided
--   :l, :t:<tenant>     members that may be evicted, by last use: without stored children, without leases
--   :d, :d:<tenant>     flushed generations that still take space
--   :e                  leases by expiry (ms): member .. holder
--   :lp                 member -> number of its leases      :h:<holder> member -> expiry
--   :s:<generation>     slots of anchor pools; :a: their data, :o: by age, :c: uses, each .. <generation><slot>
local root, call = KEYS[1], redis.call
local INDEX, USED, KIDS, PAGE = root .. ':i:', root .. ':u:', root .. ':k:', root .. ':p:'
local GENERATION, LEAVES, TENANT_LEAVES = root .. ':g:', root .. ':l', root .. ':t:'
local DEAD, TENANT_DEAD, SCOPES, TENANTS = root .. ':d', root .. ':d:', root .. ':scopes', root .. ':tenants'
local EPOCHS, INFO = root .. ':epochs', root .. ':info'
local FLUSHES, ASKED, FLUSHED = root .. ':f', root .. ':fs', root .. ':r:'
local LEASES, LEASED, HOLDER = root .. ':e', root .. ':lp', root .. ':h:'
local SLOTS, ANCHORS, AGES, USES = root .. ':s:', root .. ':a:', root .. ':o:', root .. ':c:'
-- Pages that one run of a script may take away, so that none holds up the server's other clients.
local work = WORK_PAGES

local known = call('HMGET', root, 'layout', 'pending')
local layout, pending = known[1], tonumber(known[2] or 0)
if layout and layout ~= LAYOUT then
  return redis.error_reply('CROSSFILLLAYOUT ' .. layout)
end

-- A server without memory refuses a script's first write if it could grow, and none after it. What must also work then
-- (to read, to take away) makes a write first that changes nothing; what stores lets itself be refused, whole.
local function whatever_the_memory()
  call('HDEL', root, '')
end

-- How often the store was flushed. The first number is the time, so that it does not go back when keys, and this number
-- with them, are lost. So it is on another server, or the same after a restart: what that has may be older than what was
-- there, and lack flushes that were answered.
local function number_flushes()
  local known = call('HMGET', root, 'flushes', 'server')
  local is_other, id = is_other_server(known[2])
  if not known[1] or is_other then
    local now = call('TIME')
    -- Though the clock went back, more than the flushes that it may lack.
    local number = math.max(now[1] * 1000000 + now[2], (tonumber(known[1]) or 0) + 2 ^ 20)
    call('HSET', root, 'flushes', string.format('%d', number), 'server', id)
  end
  return call('HGET', root, 'flushes')
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

-- Keys that were lost (evicted by the server, deleted by hand) leave sums that nobody can put right: the store begins
-- anew, empty. What is left of the old one belongs to generations without a name, and `compact` deletes it.
local function begin_anew()
  local lost = {}
  for _, tenant in ipairs(call('HKEYS', TENANTS)) do
    lost[#lost + 1], lost[#lost + 2] = TENANT_LEAVES .. tenant, TENANT_DEAD .. tenant
  end
  call_in_pieces(lost, 'UNLINK')
  -- The clock goes on: a publish that is under way holds a time of it. So does the number of flushes.
  local kept = call('HMGET', root, 'tick', 'flushes', 'server')
  call('UNLINK', root, SCOPES, EPOCHS, INFO, TENANTS, LEAVES, DEAD, LEASES, LEASED, FLUSHES, ASKED)
  call('HSET', root, 'layout', LAYOUT, 'tick', kept[1] or 0)
  if kept[2] then
    call('HSET', root, 'flushes', kept[2], 'server', kept[3] or '')
  end
  layout, pending = LAYOUT, 0
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

-- Ends what a scope holds, for a flush of this number; its leases are ended by `sweep`.
local function end_generation(scope, generation, number)
  local held = call('HMGET', GENERATION .. generation, 'pages', 'bytes', 'tenant')
  local pages, tenant = tonumber(held[1] or 0), held[3] or ''
  local tick = call('HINCRBY', root, 'tick', 1)
  call('HDEL', SCOPES, scope)
  if pages > 0 then
    call('ZADD', DEAD, tick, generation)
    call('ZADD', TENANT_DEAD .. tenant, tick, generation)
    call('HINCRBY', FLUSHED .. number, 'pages', pages)
    call('HINCRBY', FLUSHED .. number, 'bytes', held[2] or 0)
  else
    call('UNLINK', GENERATION .. generation)
  end
  for _, slot in ipairs(call('SMEMBERS', SLOTS .. generation)) do
    call('UNLINK', ANCHORS .. generation .. slot, AGES .. generation .. slot, USES .. generation .. slot)
  end
  call('UNLINK', SLOTS .. generation)
end

-- Flushes that are under way, the oldest first: each its number, and what it is of.
local under_way
local function flushes_under_way()
  if not under_way then
    local all = call('HGETALL', FLUSHES)
    under_way = {}
    for at = 1, #all, 2 do
      under_way[#under_way + 1] = { number = all[at], wants = { struct.unpack('<I4c0I4c0I4c0', all[at + 1]) } }
    end
    table.sort(under_way, function(one, other) return tonumber(one.number) < tonumber(other.number) end)
  end
  return under_way
end

-- The generation of a scope, or nil.
local function generation_of(scope)
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

-- Asks a scope for the flushes that are under way.
local function ask(scope)
  local flushes, last = flushes_under_way(), call('HGET', ASKED, scope)
  local newest = flushes[#flushes].number
  if last and tonumber(last) >= tonumber(newest) then
    return
  end
  local info, generation = call('HGET', INFO, scope), generation_of(scope)
  if pending == 0 or not (info or generation) then
    return
  end
  local has, first, times = info and { struct.unpack('<I4c0I4c0I4c0', info) }, nil, 0
  for _, flush in ipairs(flushes) do
    if not last or tonumber(flush.number) > tonumber(last) then
      local fits = true
      for at = 1, 3 do
        -- What is not known of a scope, because that was taken from outside, does not keep it.
        fits = fits and (flush.wants[at] == '' or not has or flush.wants[at] == '=' .. has[at])
      end
      if fits then
        first, times = first or flush.number, times + 1
      end
    end
  end
  call('HSET', ASKED, scope, newest)
  if first then
    call('HINCRBY', EPOCHS, scope, times)
    if generation then
      end_generation(scope, generation, first)
    end
  end
end

-- The generation of a scope that lookups see, or nil. Whoever looks at a scope first asks it for the flushes that are under
-- way, so one takes effect at once for all scopes although it goes through them in parts.
local function current(scope)
  if layout and pending > 0 then
    if call('HLEN', FLUSHES) == pending then
      ask(scope)
    else
      begin_anew_because('a flush that was under way is gone')
    end
  end
  return generation_of(scope)
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
    if pending > 0 then
      local flushes = flushes_under_way()
      call('HSET', ASKED, scope, flushes[#flushes].number)
    end
    tenants[generation] = tenant
  end
  return generation
end

-- Marks those of these pages that are there as used, the later in the list the more recently.
local function touch(generation, keys, first_tick)
  local known, used, scored, number = values_of(USED .. generation, keys), {}, { 'XX' }, 0
  for at = 1, #keys do
    if known[at] then
      -- Text, as Redis would make it of a number three times.
      local tick = string.format('%d', first_tick + at)
      used[2 * number + 1], used[2 * number + 2] = keys[at], tick
      scored[2 * number + 2], scored[2 * number + 3] = tick, generation .. keys[at]
      number = number + 1
    end
    if number == PIECE / 2 or (number > 0 and at == #keys) then
      call('HSET', USED .. generation, unpack(used))
      call('ZADD', LEAVES, unpack(scored))
      call('ZADD', TENANT_LEAVES .. (tenant_of(generation) or ''), unpack(scored))
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

-- What a page was counted for. If entry and data disagree on its size, the one is right that is as it was written.
local function counted(generation, key, meta)
  local size, there = data_size(meta), call('STRLEN', PAGE .. generation .. key)
  if size ~= there and not is_sound(form_of(meta)) then
    size = there
  end
  return footprint(meta, size)
end

-- Takes a page out of everything; how many bytes that gave. Its leases stay: they keep what is stored under its key next.
local function drop_page(generation, key)
  local meta, tenant = call('HGET', INDEX .. generation, key), tenant_of(generation)
  keep_from_eviction(generation, key)
  if not meta or not tenant then
    return 0
  end
  local size, parent = counted(generation, key, meta), parent_of(meta)
  call('HDEL', INDEX .. generation, key)
  call('HDEL', USED .. generation, key)
  call('UNLINK', PAGE .. generation .. key)
  count(generation, tenant, -1, -size)
  -- Of one that is lost nobody knows that it has a child less; it stays until a flush.
  if parent and call('HINCRBY', KIDS .. generation, parent, -1) <= 0 then
    call('HDEL', KIDS .. generation, parent)
    let_be_evicted(generation, parent)
  end
  return size
end

-- Whether a page is not what it should be: its entry, or how much data there is. What the data is, its reader finds out.
local function is_damaged(generation, key, meta)
  return not is_whole(meta) or call('STRLEN', PAGE .. generation .. key) ~= data_size(meta)
end

local function drop_damaged(generation, key)
  drop_page(generation, key)
  call('HINCRBY', root, 'quarantined', 1)
end
