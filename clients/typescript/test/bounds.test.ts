import assert from "node:assert/strict";
import { test } from "node:test";

import { BoundReachedError, RefusedError, Token, Unfinished, UnknownOutcomeError } from "../src/node.js";
import { BUSY, GONE, made, NO_RETRIES, results } from "./fakes.js";

const REACHED = {
  ...{ code: "bound_reached", retry: "never", applied: false, detail: "no room" },
  ...{ counter: "c", count: -(2n ** 64n), at_least: -9, room: 0 },
};

test("a refusal because of a bound is definite whatever came before", async () => {
  const { client, sent } = made([new TypeError("reset"), [503, BUSY], [409, REACHED]]);
  const error = await client.addAndGet("c", -1, { atLeast: -9, atMost: 9n }).catch((error: unknown) => error);
  assert.ok(error instanceof BoundReachedError && error instanceof RefusedError);
  assert.deepEqual([error.applied, error.counter, error.count, error.room], [false, "c", -(2n ** 64n), 0n]);
  assert.deepEqual([error.atLeast, error.atMost], [-9n, undefined]);
  assert.equal(new Set(sent.map(({ body }) => body)).size, 1);
  assert.match(sent[2]!.body, /"delta":-1,"at_least":-9,"at_most":9,/);
  const { client: other } = made([[409, { ...REACHED, counter: 7, count: "8", room: null, at_least: 1.5 }], [404, GONE]]);
  const bare = await other.add("c", 1).catch((error: unknown) => error);
  assert.ok(bare instanceof BoundReachedError);
  assert.deepEqual([bare.counter, bare.count, bare.room, bare.atLeast, bare.atMost], Array(5).fill(undefined));
  const gone = await other.add("c", 1).catch((error: unknown) => error);
  assert.ok(gone instanceof RefusedError && !(gone instanceof BoundReachedError));
});

test("the items of a batch have bounds, and a refused one leaves the others", async () => {
  const { client, sent } = made([new TypeError("reset"), [200, results(REACHED, "added")]]);
  const [refused, added] = await client.batch([["c", -1, { atLeast: 0 }], ["d", 1]]);
  assert.ok(refused instanceof BoundReachedError);
  assert.ok("delta" in added! && added.delta === 1n);
  assert.equal(sent[0]!.body, sent[1]!.body);
  assert.deepEqual(JSON.parse(sent[0]!.body).items.map((each: object) => "at_least" in each), [true, false]);
});

test("an unfinished add keeps its bounds, for resolve and for cancel", async () => {
  const { client, sent } = made([new TypeError("reset")], NO_RETRIES);
  const error = await client.atomic([["c", 3, { atMost: 9 }], ["d", 1]]).catch((error: unknown) => error);
  assert.ok(error instanceof UnknownOutcomeError);
  const text = String(error.unfinished);
  assert.match(text, /"items":\[\["c",3,\{"at_most":9\}\],\["d",1\]\]/);
  assert.equal(String(Unfinished.parse(text)), text);
  await assert.rejects(client.resolve(text), UnknownOutcomeError);
  await assert.rejects(client.cancel(text), UnknownOutcomeError);
  assert.equal(new Set(sent.map(({ body }) => body)).size, 1);
  const token = Token.new();
  await assert.rejects(client.cancel({ items: [["c", 3, { atMost: 9 }]], token }), UnknownOutcomeError);
  assert.equal(JSON.parse(sent.at(-1)!.body).at_most, 9);
  for (const item of ['["c",3,9]', '["c",3,{"most":9}]', '["c",3,{"at_most":1.5}]', '["c",3,{},1]']) {
    assert.throws(() => Unfinished.parse(text.replace('["c",3,{"at_most":9}]', item)), { code: "invalid_parameter" });
  }
});

test("bounds that no count keeps, and those of a buffer, are refused", async () => {
  const { client, sent } = made([[503, BUSY]]);
  for (const bounds of [{ atLeast: 2, atMost: 1 }, { atMost: 2n ** 63n }, { atLeast: 0.5 }]) {
    await assert.rejects(client.add("c", 1, bounds), { code: "invalid_parameter" });
    await assert.rejects(client.batch([["c", 1, bounds]]), { code: "invalid_parameter" });
  }
  for (const bounds of [9, { at_most: 9 }] as any[]) {
    await assert.rejects(client.batch([["c", 1, bounds]]), { code: "invalid_parameter", message: /atLeast and atMost/ });
  }
  const buffer = client.buffer() as any;
  assert.throws(() => buffer.add("c", 1, { atMost: 9 }), { code: "invalid_parameter", message: /takes no bounds/ });
  await buffer.close();
  assert.equal(sent.length, 0);
});
