-- ARGV: scope, names (each 2 bytes of length and the name), keys, generation whose pages come by themselves ('': none).
-- The records of these names of each page: heads; the generation to name next time ('' if no page has just these
-- records); then of each page that does not come by itself its records, joined.
-- Heads: per page 0 (not there); 1 and the ends of its records (it comes by itself: it has just what is asked for, and
-- the caller gets it in the same transaction, which spares the server the way through Lua); 2 and the lengths of the
-- records (0xFFFFFFFF: not there); 3 and the ends, if it has just what is asked for and does not come by itself.
whatever_the_memory()
local generation, wanted, keys = current(ARGV[1]), ARGV[2], split(ARGV[3], KEY)
if not generation then
  return { string.rep('\0', #keys), '' }
end
local metas, heads, reply = values_of(INDEX .. generation, keys), {}, { '', '' }

local names, at = {}, 1
while at <= #wanted do
  names[#names + 1], at = struct.unpack('<I2c0', wanted, at)
end

-- Pages of one prompt have the same names, so where they lie is worked out once.
local places = {}
local function places_in(meta, framed)
  if not places[framed] then
    local order, found, from = {}, {}, 1
    for place = 1, struct.unpack('<I2', meta, COUNT_AT) do
      local name
      name, from = struct.unpack('<I2c0', framed, from)
      order[name] = place
    end
    for number, name in ipairs(names) do
      found[number] = order[name] or false
    end
    places[framed] = found
  end
  return places[framed]
end

local function pieces(meta, page, framed)
  local ends_at, lengths, found = NAMES_AT + #framed, {}, {}
  local data = #names > 4 and call('GET', page)
  for number, place in ipairs(places_in(meta, framed)) do
    if place then
      local from, to = 0, struct.unpack('<I4', meta, ends_at + 4 * (place - 1))
      if place > 1 then
        from = struct.unpack('<I4', meta, ends_at + 4 * (place - 2))
      end
      local piece = ''
      if to > from then
        piece = data and data:sub(from + 1, to) or call('GETRANGE', page, from, to - 1)
      end
      if #piece ~= to - from then
        return nil
      end
      lengths[number], found[#found + 1] = struct.pack('<I4', to - from), piece
    else
      lengths[number] = '\255\255\255\255'
    end
  end
  return '\2' .. table.concat(lengths), table.concat(found)
end

local function whole(meta, page, framed)
  local size, ends = struct.unpack('<I4', meta, #meta - 3), meta:sub(NAMES_AT + #framed)
  if generation == ARGV[4] then
    return call('STRLEN', page) == size and '\1' .. ends or nil
  end
  local data = call('GET', page)
  if data and #data == size then
    return '\3' .. ends, data
  end
end

for number, key in ipairs(keys) do
  local meta, head, body = metas[number], nil, nil
  if meta then
    local framed = meta:sub(NAMES_AT, NAMES_AT - 1 + struct.unpack('<I4', meta, COUNT_AT + 2))
    if framed == wanted then
      head, body = whole(meta, PAGE .. generation .. key, framed)
      reply[2] = generation
    else
      head, body = pieces(meta, PAGE .. generation .. key, framed)
    end
    if not head then
      -- Its data was taken from outside: the page goes, properly.
      drop_page(generation, key)
      metas[number] = false
    end
  end
  heads[number], reply[#reply + 1] = head or '\0', body
end
touch(generation, keys, metas, call('HINCRBY', root, 'tick', #keys) - #keys)
reply[1] = table.concat(heads)
return reply
