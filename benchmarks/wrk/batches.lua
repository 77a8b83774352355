-- Batches of adds under fresh tokens. Arguments: 16 hexadecimal digits, path of the namespace,
-- counters, items of a batch; also a rate of batches, if they are not to go out as fast as they can;
-- and "even" if no counter is to be hotter than another.
local common = dofile(debug.getinfo(1, "S").source:match("@(.*/)") .. "common.lua")
local path, counters, size, choose
sent = 0

function init(args)
  common.begin(args[1])
  path, counters, size = args[2] .. "/batch/add", tonumber(args[3]), tonumber(args[4])
  delay = args[5] and common.pacing(tonumber(args[5]))
  choose = args[6] == "even" and function(n) return math.random(0, n - 1) end or common.zipf
end

function request()
  sent = sent + 1
  local items = {}
  for i = 1, size do
    items[i] = string.format(
      '{"counter":"c%07d","delta":1,"idempotency_token":{"token":"%s","generation_time":"%s"}}',
      choose(counters), common.nonce(), common.generation_time())
  end
  return common.post(path, '{"items":[' .. table.concat(items, ",") .. "]}")
end

setup, done = common.setup, common.done
