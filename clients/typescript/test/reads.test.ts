import assert from "node:assert/strict";
import { test } from "node:test";

import type { RefusedError } from "../src/node.js";
import { BUSY, GONE, made, type Scripted } from "./fakes.js";

const MORE = { namespace: "default", as_of: "2026-01-31T08:15:30.000250Z", accuracy: "accurate" };

function page(next: string | null, ...counters: string[]): Scripted {
  return [200, { counters, counts: counters.map((counter) => ({ ...MORE, counter, count: 2 })), next_page: next }];
}

async function all<T>(found: AsyncIterable<T>): Promise<T[]> {
  const items: T[] = [];
  for await (const each of found) items.push(each);
  return items;
}

test("a list is read page by page, as far as the program reads and the limit goes", async () => {
  const { client, sent } = made([page("p2", "a", "b"), page("p3", "c"), page(null, "d")]);
  assert.deepEqual(await all(client.names({ prefix: "x/" })), ["a", "b", "c", "d"]);
  const queries = ["", "&page=p2", "&page=p3"].map((each) => `?prefix=x%2F&limit=1000${each}`);
  assert.deepEqual(sent.map(({ query }) => query), queries);
  const limited = made([page("p2", "a", "b"), page("p3", "c")]);
  const counts = await all(limited.client.list({ largestFirst: true, limit: 3 }));
  assert.deepEqual(counts.map(({ counter, count }) => [counter, count]), [["a", 2n], ["b", 2n], ["c", 2n]]);
  assert.match(limited.sent[1]!.query, /order=-count&limit=1&page=p2/);
  const stopped = made([page("p2", "a", "b")]);
  for await (const _ of stopped.client.names()) break;
  assert.equal(stopped.sent.length, 1);
});

test("one counter of many that cannot be read yet is read again with the others", async () => {
  const counted = { ...MORE, counter: "a", count: 1 };
  const { client, sent } = made([
    [200, { results: [counted, { ...BUSY, retry_after: 2 }] }],
    [200, { results: [counted, { ...counted, counter: "b" }] }],
    [200, { results: [counted, GONE] }],
  ]);
  assert.deepEqual((await client.getMany(["a", "b"])).map(({ counter }) => counter), ["a", "b"]);
  assert.equal(sent[1]!.atMs, 2_100);
  await assert.rejects(client.getMany(["a", "b"]), { code: "namespace_unknown" });
});

test("arguments that the service would not understand are refused with their values", async () => {
  const { client, sent } = made([[404, GONE]]);
  await assert.rejects(client.between("c", "yesterday"), /"yesterday" is not a time/);
  await assert.rejects(client.between("c", new Date(NaN)), /not a time/);
  await assert.rejects(client.getMany("abc"), /give a list of names/);
  await assert.rejects(all(client.list({ limit: 1.5 })), /limit is 1.5; it must be an integer, 0 or more/);
  await assert.rejects(client.sum("\ud800"), /lone surrogate/);
  assert.equal(sent.length, 0);
  await client.between("c", new Date(0), "2026-01-31T10:15:30+02:00").catch((error: RefusedError) => error.code);
  assert.equal(sent[0]!.query, "?from=1970-01-01T00%3A00%3A00.000Z&to=2026-01-31T10%3A15%3A30%2B02%3A00");
});

test("JSON.stringify takes what is nested", async () => {
  const counters = [{ counter: "c", adds_per_s: 1.5, count: 2 }];
  const busy = { since: MORE.as_of, as_of: MORE.as_of, complete: true, counters };
  const rule = { type: "paid", delta: 2n ** 53n };
  const settings = { namespace: "default", counter_type: "ACCURATE", event_rules: [rule] };
  const why = { delta: 2, count: 2n ** 53n, at_most: 9 };
  const refused = { event_time: MORE.as_of, event_id: "x", event_item_key: 0, delta: 0, at_least: 0, refused: why };
  const { client } = made([[200, busy], [200, settings], [200, { events: [refused], next_page: null }]]);
  assert.match(JSON.stringify(await client.busiest()), /"counters":\[{"counter":"c","addsPerS":1.5,"count":2}]/);
  assert.match(JSON.stringify(await client.settings()), /"event_rules":\[{"type":"paid","delta":"9007199254740992"}]/);
  const shown = JSON.stringify(await all(client.events("c")));
  assert.match(shown, /"atLeast":0,"refused":{"delta":2,"count":"9007199254740992","atMost":9}}]$/);
});
