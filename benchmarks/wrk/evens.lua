-- Single adds under fresh tokens, no counter hotter than another. Arguments: 16 hexadecimal digits,
-- path of the namespace, counters.
local common = dofile(debug.getinfo(1, "S").source:match("@(.*/)") .. "common.lua")
local base, counters
sent = 0

function init(args)
  common.begin(args[1])
  base, counters = args[2], tonumber(args[3])
end

function request()
  sent = sent + 1
  return common.post(
    string.format("%s/counters/c%07d/add", base, math.random(0, counters - 1)), common.add_body())
end

setup, done = common.setup, common.done
