-- Adds that go out at a rate whether answers come or not, as those of many clients do: a request
-- whose turn finds no connection free is given up by its client. Arguments: 16 hexadecimal digits,
-- path of the namespace, counters, adds of a request (1: a single add), requests a second, and how
-- many milliseconds a client waits for its answer. A request is good if it is answered 200 in time.
local common = dofile(debug.getinfo(1, "S").source:match("@(.*/)") .. "common.lua")
local base, counters, size, rate, patience
local turn
local heads = {}
sent, offered, accepted, good, refused = 0, 0, 0, 0, 0
-- Of the requests that were answered 200, how many took so many milliseconds.
took = {}

function init(args)
  common.begin(args[1])
  base, counters, size = args[2], tonumber(args[3]), tonumber(args[4])
  rate, patience = tonumber(args[5]), tonumber(args[6]) * 1000
end

-- Who has to wait for a turn gets the next one; turns that have passed meanwhile were given up.
function delay()
  local now = common.now_us() / 1e6
  turn = (turn or now) + 1 / rate
  offered = offered + 1
  if turn < now then
    local missed = math.floor((now - turn) * rate)
    offered, turn = offered + missed, turn + missed / rate
  end
  return math.floor(math.max(0, turn - now) * 1e3 + math.random())
end

local function batch()
  local tail = string.format('","generation_time":"%s"}}', common.generation_time())
  local items = {}
  for i = 1, size do
    local counter = common.zipf(counters)
    local head = heads[counter]
    if head == nil then
      head = string.format('{"counter":"c%07d","delta":1,"idempotency_token":{"token":"', counter)
      heads[counter] = head
    end
    items[i] = head .. common.nonce() .. tail
  end
  return common.post(base .. "/batch/add", '{"items":[' .. table.concat(items, ",") .. "]}")
end

function request()
  sent = sent + 1
  if size > 1 then
    return batch()
  end
  return common.post(
    string.format("%s/counters/c%07d/add", base, common.zipf(counters)), common.add_body())
end

function response(status, headers, body)
  local us = status == 200 and common.passed_us(body)
  if not us then
    refused = refused + 1
    return
  end
  accepted = accepted + 1
  if us <= patience then
    good = good + 1
  end
  local ms = math.ceil(us / 1000)
  took[ms] = (took[ms] or 0) + 1
end

setup = common.setup

function done(summary)
  local thread = common.threads[1]
  local errors = summary.errors
  io.write(string.format(
    'RESULT {"seconds":%.6f,"offered":%d,"sent":%d,"accepted":%d,"good":%d,"refused":%d,"broken":%d,'
      .. '"p50_ms":%d,"p99_ms":%d}\n',
    summary.duration / 1e6, thread:get("offered"), thread:get("sent") - 1, thread:get("accepted"),
    thread:get("good"), thread:get("refused"),
    errors.connect + errors.read + errors.write + errors.timeout,
    common.percentile(thread:get("took"), 0.5), common.percentile(thread:get("took"), 0.99)))
end
