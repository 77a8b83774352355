-- Holds under fresh tokens, each settled with less than was held when a thousand later ones were sent:
-- by then it was answered. Arguments: 16 hexadecimal digits, path of the namespace, counters.
local common = dofile(debug.getinfo(1, "S").source:match("@(.*/)") .. "common.lua")
local digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
local base, counters
local LATER = 1000
local held = {}
begun, ended, sent = 0, 0, 0

function init(args)
  common.begin(args[1])
  base, counters = args[2], tonumber(args[3])
end

local function url_safe(bytes)
  local found = {}
  for at = 1, #bytes, 3 do
    local a, b, c = bytes:byte(at, at + 2)
    local number = a * 65536 + (b or 0) * 256 + (c or 0)
    for place = 0, c and 3 or b and 2 or 1 do
      local digit = math.floor(number / 64 ^ (3 - place)) % 64
      table.insert(found, digits:sub(digit + 1, digit + 1))
    end
  end
  return table.concat(found)
end

-- The id of a hold: the time of its token in eight bytes, the nonce, and the counter.
local function id_of(us, nonce, counter)
  local time = {}
  for place = 7, 0, -1 do
    table.insert(time, string.char(math.floor(us / 256 ^ place) % 256))
  end
  local bytes = nonce:gsub("..", function(pair) return string.char(tonumber(pair, 16)) end)
  return url_safe(table.concat(time) .. bytes .. counter)
end

function request()
  sent = sent + 1
  if sent % 2 == 0 and begun > LATER then
    ended = ended + 1
    local hold = held[ended]
    held[ended] = nil
    return common.post(string.format("%s/holds/%s/settle", base, hold), '{"amount":1}')
  end
  -- The first one is only looked at by wrk, and not sent.
  begun = sent > 1 and begun + 1 or 0
  local counter, nonce = string.format("c%07d", common.zipf(counters)), common.nonce()
  local time = common.generation_time()
  held[begun] = id_of(common.latest_us(), nonce, counter)
  return common.post(
    string.format("%s/counters/%s/holds", base, counter),
    string.format(
      '{"amount":2,"expires_in":"1h","at_most":%.0f,"idempotency_token":{"token":"%s","generation_time":"%s"}}',
      2 ^ 52, nonce, time))
end

setup = common.setup

function done(summary, latency, requests)
  local thread = common.threads[1]
  common.done(
    summary, latency, requests,
    string.format('"begun":%d,"ended":%d,', thread:get("begun"), thread:get("ended")))
end
