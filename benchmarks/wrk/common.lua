-- What all the load scripts share: fresh tokens, skewed choice, requests, one line of results.
local ffi = require("ffi")
ffi.cdef("typedef struct { long s; long ns; } bench_time; int clock_gettime(int, bench_time *);")

local common = {}
local reading = ffi.new("bench_time")
local latest_us = 0
local second, second_text, second_of = -1, "", {}

-- The time of now in microseconds.
function common.now_us()
  ffi.C.clock_gettime(0, reading)
  return tonumber(reading.s) * 1e6 + math.floor(tonumber(reading.ns) / 1e3)
end

-- RFC 3339 with microseconds: the given time, or now; strictly later than the one before.
function common.generation_time(us)
  latest_us = math.max(latest_us + 1, us or common.now_us())
  local now = math.floor(latest_us / 1000000)
  if now ~= second then
    second, second_text = now, os.date("!%Y-%m-%dT%H:%M:%S", now)
    second_of[second_text] = now
  end
  return string.format("%s.%06dZ", second_text, latest_us % 1000000)
end

-- The microseconds of the latest generation_time.
function common.latest_us()
  return latest_us
end

-- How many microseconds ago the generation_time was that comes back in the body of a response; nil
-- if there is none.
function common.passed_us(body)
  local at = select(2, body:find('"event_time":"', 1, true))
  if at then
    local seconds = second_of[body:sub(at + 1, at + 19)]
    return common.now_us() - seconds * 1e6 - tonumber(body:sub(at + 21, at + 26))
  end
end

-- The value that a *share* of those in *histogram*, a table of how often each came, do not pass.
function common.percentile(histogram, share)
  local values, total = {}, 0
  for value, times in pairs(histogram) do
    table.insert(values, value)
    total = total + times
  end
  table.sort(values)
  local left = share * total
  for _, value in ipairs(values) do
    left = left - histogram[value]
    if left <= 0 then
      return value
    end
  end
  return 0
end

local prefix, issued = "", 0

-- 32 hexadecimal digits: 16 that the caller drew for this run, and a number.
function common.nonce()
  issued = issued + 1
  return prefix .. string.format("%016x", issued)
end

-- The body of an add of 1, under a token of the given time, or of now; with more members, if any.
function common.add_body(us, more)
  return string.format(
    '{"delta":1,%s"idempotency_token":{"token":"%s","generation_time":"%s"}}',
    more or "", common.nonce(), common.generation_time(us))
end

function common.begin(run)
  prefix = run
  math.randomseed(tonumber(run:sub(1, 7), 16))
end

-- From 0 to n - 1, each k about as often as 1/(k + 1): a few names are hot, most are rare.
function common.zipf(n)
  return math.floor(n ^ math.random()) - 1
end

function common.post(path, body)
  return string.format(
    "POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
    path, #body, body)
end

-- Have all connections together send *rate* requests a second, each at a turn of its own; one that
-- calls this has wrk's `delay` be it. wrk waits whole milliseconds, so fractions are drawn. Answers
-- that come too late for the next turn delay it: then the rate is not reached, which is seen.
function common.pacing(rate)
  local turn
  return function()
    ffi.C.clock_gettime(1, reading)
    local now = tonumber(reading.s) + tonumber(reading.ns) / 1e9
    turn = math.max((turn or now) + 1 / rate, now - 1)
    return math.floor(math.max(0, turn - now) * 1e3 + math.random())
  end
end

local threads = {}
common.threads = threads

function common.setup(thread)
  table.insert(threads, thread)
end

-- One line of JSON, with the given members before the usual ones; `sent` is what was put on the wire,
-- answered or not. wrk asks the first thread for one more request than it sends, to look at it.
function common.done(summary, latency, _, given)
  local sent = -1
  for _, thread in ipairs(threads) do
    sent = sent + thread:get("sent")
  end
  local errors = summary.errors
  io.write(string.format(
    'RESULT {%s"requests":%d,"seconds":%.6f,"bytes":%d,"sent":%d,"bad":%d,"broken":%d,'
      .. '"p50_ms":%.3f,"p99_ms":%.3f}\n',
    given or "", summary.requests, summary.duration / 1e6, summary.bytes, sent, errors.status,
    errors.connect + errors.read + errors.write + errors.timeout,
    latency:percentile(50) / 1e3, latency:percentile(99) / 1e3))
end

return common
