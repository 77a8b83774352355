// Adds 2 with a token, sends the same add again, and prints the count.
import createClient from "openapi-fetch";

import type { paths } from "./schema.js";

const [url] = process.argv.slice(2);
const client = createClient<paths>({ baseUrl: url });
const path = { namespace: "default", counter: "openapi-fetch" };
const token = { token: crypto.randomUUID(), generation_time: new Date().toISOString() };
for (let sent = 0; sent < 2; sent++) {
  const { data, error } = await client.POST("/v1/namespaces/{namespace}/counters/{counter}/add", {
    params: { path },
    body: { delta: 2, idempotency_token: token },
  });
  if (error) throw new Error(error.detail);
  console.log("replayed", data.replayed);
}
const { data, error } = await client.GET("/v1/namespaces/{namespace}/counters/{counter}", {
  params: { path, query: { max_staleness: "0s" } },
});
if (error) throw new Error(error.detail);
console.log("count", data.count);
