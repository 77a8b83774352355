// Sends batches of events, one a line of standard input, with OpenMeter's client, and each again until it is accepted.
import { readFileSync } from "node:fs";
import { OpenMeter } from "@openmeter/sdk";

const [baseUrl, apiKey] = process.argv.slice(2);
const { events } = new OpenMeter({ baseUrl, apiKey });
const batches = readFileSync(0, "utf8").trim().split("\n").map((line) => JSON.parse(line));
let failures = 0;

async function send(batch) {
  for (;;) {
    try {
      return await events.ingest(batch, { signal: AbortSignal.timeout(500) });
    } catch (error) {
      if (++failures > 10_000) throw error;
    }
  }
}

// Eight senders at once; each batch waits only for those before it in its own line.
await Promise.all([...Array(8).keys()].map(async (first) => {
  for (let at = first; at < batches.length; at += 8) await send(batches[at]);
}));
console.log("failures", failures);
// Answers without an end would keep the program.
process.exit();
