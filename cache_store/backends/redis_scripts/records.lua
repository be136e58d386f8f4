-- Stands before the scripts that change what a page holds.

-- Records by name, of an entry that is whole.
local function parts_of(meta, data)
  local records, at, from = {}, NAMES_AT, 1
  local number, length = struct.unpack('<I2I4', meta, COUNT_AT)
  local ends_at = NAMES_AT + length
  for record = 1, number do
    local name, finish
    name, at = struct.unpack('<I2c0', meta, at)
    finish = struct.unpack('<I4', meta, ends_at + 4 * (record - 1))
    records[name] = data:sub(from, finish)
    from = finish + 1
  end
  return records
end

-- Entry and data of these records; `head` is what stands before the form.
local function joined(head, records)
  local sorted, names, ends, data, at = {}, {}, {}, {}, 0
  for name in pairs(records) do
    sorted[#sorted + 1] = name
  end
  table.sort(sorted)
  for place, name in ipairs(sorted) do
    names[place] = struct.pack('<I2c0', #name, name)
    data[place] = records[name]
    at = at + #records[name]
    ends[place] = struct.pack('<I4', at)
  end
  local framed = table.concat(names)
  -- The size of the data comes last even without records.
  local tail = #sorted > 0 and table.concat(ends) or struct.pack('<I4', 0)
  return head .. sealed(struct.pack('<I2I4', #sorted, #framed) .. framed .. tail), table.concat(data)
end
