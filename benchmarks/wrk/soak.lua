-- Single adds at a steady rate, no counter hotter than another, for a long time. Arguments: 16
-- hexadecimal digits, path of the namespace, counters, adds a second, seconds of a part. Each add has
-- a turn, which is its token's time; how long it took is counted from there, in each part by itself.
local common = dofile(debug.getinfo(1, "S").source:match("@(.*/)") .. "common.lua")
local base, counters, rate, part_us
local turn, turns, first, last, began_us = nil, {}, 1, 0, nil
sent = 0
-- The responses by their part and how many tenths of a millisecond they took, in one number, because
-- wrk copies no tables of tables.
took = {}
local PART = 1e6

function init(args)
  common.begin(args[1])
  base, counters = args[2], tonumber(args[3])
  rate, part_us = tonumber(args[4]), tonumber(args[5]) * 1e6
end

-- No turn is left out: adds that come late because others were late are late.
function delay()
  local now = common.now_us()
  began_us = began_us or now
  turn = (turn or now) + 1e6 / rate
  last = last + 1
  turns[last] = turn
  return math.floor(math.max(0, turn - now) / 1e3 + math.random())
end

function request()
  sent = sent + 1
  local due = turns[first]
  if due then
    turns[first], first = nil, first + 1
  end
  local path = string.format("%s/counters/c%07d/add", base, math.random(0, counters - 1))
  return common.post(path, common.add_body(due and math.floor(math.min(due, common.now_us()))))
end

function response(status, headers, body)
  local us = status == 200 and common.passed_us(body)
  if not us then
    return
  end
  local part = math.floor((common.now_us() - began_us) / part_us) + 1
  local key = part * PART + math.min(math.ceil(us / 100), PART - 1)
  took[key] = (took[key] or 0) + 1
end

setup = common.setup

function done(summary, latency)
  local parts, lines = {}, {}
  for key, times in pairs(common.threads[1]:get("took")) do
    local part = math.floor(key / PART)
    parts[part] = parts[part] or {}
    parts[part][key % PART] = times
  end
  for number, part in ipairs(parts) do
    lines[number] = string.format("%.1f", common.percentile(part, 0.99) / 10)
  end
  common.done(summary, latency, nil, string.format('"p99s_ms":[%s],', table.concat(lines, ",")))
end
