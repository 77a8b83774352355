-- Single adds, each to a new counter, under fresh tokens. Arguments: 16
-- hexadecimal digits, path of the namespace, what the counters' names begin with.
local common = dofile(debug.getinfo(1, "S").source:match("@(.*/)") .. "common.lua")
local base, prefix
sent = 0

function init(args)
  common.begin(args[1])
  base, prefix = args[2], args[3]
end

function request()
  sent = sent + 1
  return common.post(
    string.format("%s/counters/%s%07d/add", base, prefix, sent - 1), common.add_body())
end

setup, done = common.setup, common.done
