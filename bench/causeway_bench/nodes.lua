-- Requests to node-1 … node-N in turn: `wrk -s nodes.lua URL -- N`. Its output at the end is that of wrk.lua.
dofile(debug.getinfo(1, "S").source:match("^@(.*)/") .. "/wrk.lua")

local asked = {}
local last = 0

function init(args)
  for index = 1, tonumber(args[1]) do
    wrk.headers["Host"] = "node-" .. index
    asked[index] = wrk.format("GET", "/1k")
  end
end

function request()
  last = last % #asked + 1
  return asked[last]
end
