-- Gets. Arguments: 16 hexadecimal digits, path of the namespace, how many counters, the first of
-- them; each is as likely.
local common = dofile(debug.getinfo(1, "S").source:match("@(.*/)") .. "common.lua")
local base, first, last
sent = 0

function init(args)
  common.begin(args[1])
  base, first = args[2], tonumber(args[4])
  last = first + tonumber(args[3]) - 1
end

function request()
  sent = sent + 1
  return string.format(
    "GET %s/counters/c%07d HTTP/1.1\r\nHost: bench\r\n\r\n", base, math.random(first, last))
end

setup, done = common.setup, common.done
