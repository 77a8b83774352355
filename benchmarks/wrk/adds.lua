-- Single adds under fresh tokens. Arguments: 16 hexadecimal digits, path of the namespace, counters,
-- and "even" where no counter is to be hotter than another.
local common = dofile(debug.getinfo(1, "S").source:match("@(.*/)") .. "common.lua")
local base, counters
local place = common.zipf
sent = 0

function init(args)
  common.begin(args[1])
  base, counters = args[2], tonumber(args[3])
  if args[4] == "even" then
    place = common.even
  end
end

function request()
  sent = sent + 1
  return common.post(
    string.format("%s/counters/c%07d/add", base, place(counters)), common.add_body())
end

setup, done = common.setup, common.done
