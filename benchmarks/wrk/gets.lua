-- Gets. Arguments: 16 hexadecimal digits, path of the namespace, how many counters, the first of
-- them; each is as likely. Also a query, and a rate if they are not to go out as fast as they can.
local common = dofile(debug.getinfo(1, "S").source:match("@(.*/)") .. "common.lua")
local base, first, last, query
sent = 0

function init(args)
  common.begin(args[1])
  base, first = args[2], tonumber(args[4])
  last = first + tonumber(args[3]) - 1
  query = args[5] or ""
  delay = args[6] and common.pacing(tonumber(args[6]))
end

function request()
  sent = sent + 1
  return string.format(
    "GET %s/counters/c%07d%s HTTP/1.1\r\nHost: localhost\r\n\r\n",
    base, math.random(first, last), query)
end

setup, done = common.setup, common.done
