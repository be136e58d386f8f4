-- Stands before `store.lua`: what the index holds of a page.
--
--   digest (32), parent (16), checksum; parent, checksum; form, checksum
--
-- The form is the count of records (2), bytes of their names (4), names, ends. The parent stands there twice, because who
-- takes a damaged page away must know whose child it was. Checksums are those of `checksum.py`; to work one out takes Lua
-- about 0.2 microseconds a byte, so it is done where something differs from what it should be, and once for pages alike.
local KEY, DIGEST, COUNT_AT, NAMES_AT = 16, 32, 73, 79
local PARENT_ENDS, AGAIN_ENDS, SHORTEST = 52, 72, 72 + 6 + 4 + 4
-- Bytes whose checksum was worked out.
local checked_bytes = 0

local crc_of_byte
local function make_crcs()
  -- Of 128, 64 and so on; all others are sums of those.
  local crcs, crc, power = { [0] = 0 }, 1, 128
  while power >= 1 do
    crc = bit.bxor(bit.rshift(crc, 1), bit.band(crc, 1) == 1 and 0xEDB88320 or 0)
    for at = 0, 255, 2 * power do
      crcs[power + at] = bit.bxor(crc, crcs[at])
    end
    power = power / 2
  end
  return crcs
end

-- The register of a CRC-32 after this text, from what it is after any that is sealed.
local SEALED = bit.bnot(0x2144DF1C)
local function register_after(text)
  crc_of_byte = crc_of_byte or make_crcs()
  local register, crcs, bxor, band, rshift, byte = SEALED, crc_of_byte, bit.bxor, bit.band, bit.rshift, string.byte
  for at = 1, #text do
    register = bxor(rshift(register, 8), crcs[band(bxor(register, byte(text, at)), 255)])
  end
  checked_bytes = checked_bytes + #text
  return register
end

local seals = {}
local function sealed(piece)
  if not seals[piece] then
    seals[piece] = piece .. struct.pack('<I4', bit.bnot(register_after(piece)) % 4294967296)
  end
  return seals[piece]
end

local sound = {}
local function is_sound(piece)
  if sound[piece] == nil then
    sound[piece] = register_after(piece) == SEALED
  end
  return sound[piece]
end

local function form_of(meta)
  return meta:sub(COUNT_AT)
end

-- Whether an entry is as it was written.
local function is_whole(meta)
  return #meta >= SHORTEST and is_sound(meta:sub(1, PARENT_ENDS)) and is_sound(meta:sub(PARENT_ENDS + 1, AGAIN_ENDS))
    and is_sound(form_of(meta))
end

-- Spares `is_whole` what an entry has in common with one that is known to be whole.
local function trust(meta)
  sound[meta:sub(1, PARENT_ENDS)], sound[meta:sub(PARENT_ENDS + 1, AGAIN_ENDS)], sound[form_of(meta)] = true, true, true
end

-- nil if both were altered.
local function parent_of(meta)
  local parent, again = meta:sub(DIGEST + 1, DIGEST + KEY), meta:sub(PARENT_ENDS + 1, PARENT_ENDS + KEY)
  if parent == again or is_sound(meta:sub(1, PARENT_ENDS)) then
    return parent
  end
  return is_sound(meta:sub(PARENT_ENDS + 1, AGAIN_ENDS)) and again or nil
end

local function data_size(meta)
  return #meta >= SHORTEST and struct.unpack('<I4', meta, #meta - 7) or -1
end

-- As much as the server's allocator (jemalloc) takes for so many bytes: sixteens, above 128 four sizes a doubling.
local function rounded(size)
  local step = 16
  if size > 128 then
    local _, doublings = math.frexp(size - 1)
    step = 2 ^ (doublings - 3)
  end
  return math.ceil(size / step) * step
end

-- What a page with this entry and so much data (as it says, if nothing else is known) is counted for.
local function footprint(meta, size)
  return rounded((size or data_size(meta)) + STRING_BYTES) + rounded(#meta + STRING_BYTES) + PAGE_OVERHEAD
end
