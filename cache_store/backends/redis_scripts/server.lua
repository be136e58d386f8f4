-- Stands before every script: whether the server is the one that numbered the flushes last.

-- Of this run of the server; '' if its user may not ask.
local function run_id()
  local about = redis.pcall('INFO', 'server')
  return type(about) == 'string' and about:match('run_id:(%x+)') or ''
end

local function is_other_server(known)
  local id = run_id()
  return id ~= '' and id ~= known, id
end
