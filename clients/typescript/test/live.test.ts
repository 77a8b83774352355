import assert from "node:assert/strict";
import { test } from "node:test";

import { type Count, type CounterClient, CounterError, RefusedError, UnavailableError } from "../src/node.js";
import { BUSY, GONE, made, NO_RETRIES } from "./fakes.js";

const MORE = { namespace: "default", counter: "c", as_of: "2026-01-31T08:15:30.000250Z", accuracy: "accurate" };

function event(name: string, data: object): string {
  return `event: ${name}\ndata: ${JSON.stringify(data)}\n\n`;
}

function counted(...counts: number[]): string {
  return counts.map((count) => event("count", { ...MORE, count })).join("");
}

/** Return the counts, or the codes of problems, of the first `most` updates. */
async function first(most: number, client: CounterClient): Promise<unknown[]> {
  const found: unknown[] = [];
  for await (const each of client.live("c")) {
    found.push(each instanceof CounterError ? each.code : Number(each.count));
    if (found.length === most) return found;
  }
  return found;
}

test("a stream yields its counts, and connects again when it ends", async () => {
  const { client, sent } = made([
    [200, counted(1, 2)],
    [200, `: alive\r\n\r\nid: 1\nevent: end\ndata: x\n\n${counted(3)}`],
  ]);
  assert.deepEqual(await first(3, client), [1, 2, 3]);
  assert.deepEqual(sent.map(({ path, atMs }) => [path.split("/").at(-1), atMs]), [["live", 0], ["live", 50]]);
  assert.equal(sent[0]!.headers["accept"], "text/event-stream");
});

test("a connection that is silent is replaced by another one", async () => {
  const { client, sent } = made([{ open: counted(1) }, [503, BUSY], { open: counted(2) }], { deadlineMs: 60_000 });
  assert.deepEqual(await first(2, client), [1, 2]);
  assert.deepEqual(sent.map(({ atMs }) => atMs), [0, 40_100, 40_300]);
});

test("a program that stops reading closes the connection", async () => {
  const { client, sent } = made([{ open: counted(1, 2) }]);
  await first(1, client);
  assert.ok(sent[0]!.signal.aborted);
});

test("a stream ends with its signal, also in a pause", async () => {
  const open = made([{ open: counted(1) }]);
  const ended = new AbortController();
  const found: Count[] = [];
  for await (const each of open.client.live("c", { signal: ended.signal })) {
    found.push(each as Count);
    open.clock.hold = true;
    setImmediate(() => ended.abort());
  }
  assert.equal(found.length, 1);
  const busy = made([[503, BUSY]]);
  const other = new AbortController();
  const next = busy.client.live("c", { signal: other.signal }).next();
  busy.clock.hold = true;
  setImmediate(() => other.abort());
  assert.equal((await next).done, true);
});

test("a temporary problem is yielded, and a permanent one thrown", async () => {
  const { client } = made([[200, event("problem", BUSY) + counted(1) + event("problem", GONE) + counted(2)]]);
  const found = client.live("c");
  assert.equal(((await found.next()).value as RefusedError).code, "overloaded");
  assert.equal(((await found.next()).value as Count).count, 1n);
  await assert.rejects(found.next(), { code: "namespace_unknown" });
  await assert.rejects(first(1, made([[404, GONE]]).client), RefusedError);
  await assert.rejects(first(1, made([[404, "a page"]]).client), UnavailableError);
});

test("a stream of something else is read again after pauses that grow", async () => {
  const { client, sent } = made([[200, "<html>\n</html>\n"], [200, "data: x\n\n"], [200, counted(1)]]);
  assert.deepEqual(await first(1, client), [1]);
  assert.deepEqual(sent.map(({ atMs }) => atMs), [0, 100, 300]);
});

test("a comment is a sign of a counter service, and a page is none", async () => {
  const { client, sent } = made([[200, ": alive\n\n"], [503, BUSY], [200, ": alive\n\n"], [503, BUSY], [200, counted(1)]]);
  assert.deepEqual(await first(1, client), [1]);
  // Each comment ends the row of failures.
  assert.deepEqual(sent.map(({ atMs }) => atMs), [0, 50, 150, 200, 300]);
  const alive = made([...Array(20).fill([200, ": alive\n\n", {}]), [200, counted(1)]], { deadlineMs: 200 });
  assert.deepEqual(await first(1, alive.client), [1]);
  const page = made([[200, "<html>\n</html>\n"]], { deadlineMs: 200 });
  await assert.rejects(first(1, page.client), /a stream without a count/);
});

test("a stream gives up when nothing came for the deadline, and spends no retries", async () => {
  const { client, sent, clock } = made([[200, counted(1)], [503, BUSY]], NO_RETRIES);
  await assert.rejects(first(2, client), UnavailableError);
  assert.ok(sent.length > 5 && clock.now() >= 30_000, `${sent.length} requests in ${clock.now()} ms`);
});
