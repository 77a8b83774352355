-- Single adds under fresh tokens. Arguments: 16 hexadecimal digits, path of the namespace, counters;
-- also a rate, if they are not to go out as fast as they can, or "-"; and their at_most, if they are
-- bounded.
local common = dofile(debug.getinfo(1, "S").source:match("@(.*/)") .. "common.lua")
local base, counters, bounds
sent = 0

function init(args)
  common.begin(args[1])
  base, counters = args[2], tonumber(args[3])
  local rate = tonumber(args[4])
  delay = rate and common.pacing(rate)
  bounds = args[5] and string.format('"at_most":%s,', args[5])
end

function request()
  sent = sent + 1
  return common.post(
    string.format("%s/counters/c%07d/add", base, common.zipf(counters)), common.add_body(nil, bounds))
end

setup, done = common.setup, common.done
