-- ARGV: scope, names (each 2 bytes of length and the name), keys, generation whose pages come by themselves ('': none).
-- The records of these names of each page: heads; the generation to name next time ('' if no page has just these
-- records); how many pages were damaged and are taken away; then of each page that does not come by itself its records,
-- joined.
-- Heads: per page 0 (not there); 1 and the ends of its records (it comes by itself: it has just what is asked for, and
-- the caller gets it in the same transaction, which spares the server the way through Lua); 2 and the lengths of the
-- records (0xFFFFFFFF: not there); 3 and the ends, if it has just what is asked for and does not come by itself.
whatever_the_memory()
local generation, wanted, keys = current(ARGV[1]), ARGV[2], split(ARGV[3], KEY)
if not generation then
  return { string.rep('\0', #keys), '', 0 }
end
local metas, heads, reply = values_of(INDEX .. generation, keys), {}, { '', '', 0 }

local names, at = {}, 1
while at <= #wanted do
  names[#names + 1], at = struct.unpack('<I2c0', wanted, at)
end

-- Where the records lie that are wanted: the head, and what to read, first and last byte counted from 0, neighbours
-- together. Names are sorted here and there, so it is in their order. Fails, one way or another, on a form that is none;
-- on one that was altered otherwise it gives what its reader refuses.
local function find_places(meta)
  local count, length = struct.unpack('<I2I4', meta, COUNT_AT)
  local ends, order, from, before = NAMES_AT + length, {}, NAMES_AT, 0
  assert(#meta == ends + 4 * math.max(count, 1) + 3)
  for place = 1, count do
    local name
    name, from = struct.unpack('<I2c0', meta, from)
    local finish = struct.unpack('<I4', meta, ends + 4 * (place - 1))
    order[name], before = { before, finish }, finish
  end
  local lengths, spans, size = {}, {}, 0
  for number, name in ipairs(names) do
    local span = order[name]
    lengths[number] = span and struct.pack('<I4', span[2] - span[1]) or '\255\255\255\255'
    if span and span[2] > span[1] then
      size = size + span[2] - span[1]
      if #spans > 0 and spans[#spans][2] == span[1] then
        spans[#spans][2] = span[2]
      else
        spans[#spans + 1] = span
      end
    end
  end
  for _, span in ipairs(spans) do
    -- Text, as Redis would make it of a number for each page.
    span[1], span[2] = string.format('%d', span[1]), string.format('%d', span[2] - 1)
  end
  return { head = '\2' .. table.concat(lengths), spans = spans, size = size }
end

-- Pages of one prompt are alike, so where their records lie is worked out once.
local found = {}
local function pieces(meta, page)
  local form = form_of(meta)
  local places = found[form]
  if places == nil then
    local good, result = pcall(find_places, meta)
    places = good and result
    found[form] = places
  end
  if not places then
    return nil
  end
  local spans, body = places.spans, ''
  if #spans == 1 then
    body = call('GETRANGE', page, spans[1][1], spans[1][2])
  elseif #spans > 1 then
    local parts, data = {}, #spans > 4 and call('GET', page)
    for number, span in ipairs(spans) do
      parts[number] = data and data:sub(span[1] + 1, span[2] + 1) or call('GETRANGE', page, span[1], span[2])
    end
    body = table.concat(parts)
  end
  if #body == places.size then
    return places.head, body
  end
end

local function whole(meta, page, framed)
  local size, ends = data_size(meta), meta:sub(NAMES_AT + #framed, -5)
  if #ends ~= 4 * math.max(#names, 1) then
    return nil
  end
  if generation == ARGV[4] then
    return call('STRLEN', page) == size and '\1' .. ends or nil
  end
  local data = call('GET', page)
  if data and #data == size then
    return '\3' .. ends, data
  end
end

local data_of = PAGE .. generation
for number, key in ipairs(keys) do
  local meta, head, body = metas[number], nil, nil
  if meta then
    if #meta >= SHORTEST and struct.unpack('<I4', meta, COUNT_AT + 2) == #wanted
        and meta:sub(NAMES_AT, NAMES_AT - 1 + #wanted) == wanted then
      head, body = whole(meta, data_of .. key, wanted)
      reply[2] = generation
    else
      head, body = pieces(meta, data_of .. key)
    end
    if not head then
      drop_damaged(generation, key)
      reply[3] = reply[3] + 1
    end
  end
  heads[number], reply[#reply + 1] = head or '\0', body
end
reply[1] = table.concat(heads)
return reply
