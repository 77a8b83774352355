import assert from "node:assert/strict";
import { test } from "node:test";

import {
  BufferFullError,
  ClosedError,
  NotCountedError,
  RefusedError,
  TokenCancelledError,
  UnavailableError,
  UnknownOutcomeError,
  UnsentError,
} from "../src/node.js";
import { BUSY, CANCELLED, GONE, made, NO_RETRIES, results, type Scripted, type Sent, VOID } from "./fakes.js";

interface Item {
  readonly counter: string;
  readonly delta: number;
  readonly idempotency_token: { readonly token: string };
}

/** Counts all items of a batch. */
const COUNTED: Scripted = [200, counted];

function counted(sent: Sent): unknown {
  return results(...itemsOf(sent).map(() => "added"))(sent);
}

function itemsOf({ body }: Sent): Item[] {
  return JSON.parse(body).items;
}

function shown(sent: Sent[]): [string, number][][] {
  return sent.map((each) => itemsOf(each).map(({ counter, delta }) => [counter, delta]));
}

function tokensOf(sent: Sent[]): number {
  return new Set(sent.flatMap(itemsOf).map((each) => each.idempotency_token.token)).size;
}

async function failureOf(work: Promise<void>): Promise<NotCountedError> {
  const error = await work.then(() => null, (each: unknown) => each);
  assert.ok(error instanceof NotCountedError, String(error));
  return error;
}

test("adds of a counter are merged, and sent under one token", async () => {
  const { client, sent } = made([COUNTED]);
  const buffer = client.buffer();
  for (let at = 0; at < 10; at++) buffer.add("a");
  buffer.add("b", -3n);
  await buffer.flush();
  buffer.add("a", 5);
  await buffer.flush();
  await buffer.flush();
  assert.deepEqual(shown(sent), [[["a", 10], ["b", -3]], [["a", 5]]]);
  assert.equal(tokensOf(sent), 3);
});

test("adds are sent by themselves after the delay, and at once if the buffer is half full", async () => {
  const arrived: (() => void)[] = [];
  const answer: Scripted = [200, (sent: Sent) => (arrived.pop()!(), counted(sent))];
  const { client, sent } = made([answer]);
  const buffer = client.buffer({ maxDelayMs: 700, maxItems: 4 });
  await new Promise<void>((wake) => {
    arrived.push(wake);
    buffer.add("a");
  });
  await buffer.flush();
  await new Promise<void>((wake) => {
    arrived.push(wake);
    for (const counter of ["a", "b"]) buffer.add(counter);
  });
  assert.deepEqual(sent.map(({ atMs }) => atMs), [700, 700]);
});

test("an outage of any length changes no token, and spends no retries of other calls", async () => {
  const { client, sent, clock } = made([new TypeError("reset"), ...Array(50).fill([503, BUSY]), COUNTED], NO_RETRIES);
  const buffer = client.buffer();
  buffer.add("a");
  await buffer.flush();
  assert.equal(tokensOf(sent), 1);
  assert.ok(clock.now() > 100_000);
});

test("adds of an outage are merged behind those in flight", async () => {
  const { client, sent, clock } = made([[503, BUSY], COUNTED]);
  const buffer = client.buffer();
  buffer.add("a");
  clock.hold = true;
  const flushed = buffer.flush();
  await new Promise(setImmediate);
  for (let at = 0; at < 3; at++) buffer.add("a");
  assert.equal(sent.length, 1);
  clock.release();
  await flushed;
  await buffer.flush();
  assert.deepEqual(shown(sent), [[["a", 1]], [["a", 1]], [["a", 3]]]);
});

test("a token that is honoured no more is not sent, and is reported once", async () => {
  const { client, sent, clock } = made([[503, BUSY, { "idempotency-ttl": "7" }]]);
  // A token has this machine's time.
  clock.beginMs = Date.now();
  const buffer = client.buffer();
  buffer.add("a", 2);
  const [{ counter, delta, error }] = (await failureOf(buffer.flush())).failed as any;
  assert.deepEqual([counter, delta], ["a", 2n]);
  assert.ok(error instanceof UnknownOutcomeError);
  assert.equal(tokensOf(sent), 1);
  assert.equal(error.unfinished.tokenText.split("@")[0], itemsOf(sent[0]!)[0]!.idempotency_token.token);
  await buffer.flush();
});

test("an item that is refused is reported, and one with a void token counted under another", async () => {
  const { client, sent } = made([[200, results("added", GONE, VOID)], [404, "no tokens"], COUNTED]);
  const buffer = client.buffer();
  for (const counter of ["a", "b", "c"]) buffer.add(counter);
  const { failed } = await failureOf(buffer.flush());
  const codes = failed.map(({ counter, error }) => [counter, (error as RefusedError).code]);
  assert.deepEqual(codes, [["b", "namespace_unknown"]]);
  assert.deepEqual(shown([sent[2]!]), [[["c", 1]]]);
  assert.match(JSON.stringify(failed), /"counter":"b","delta":1,/);
});

test("an item that was cancelled leaves the buffer as not counted, whatever came before", async () => {
  const { client, sent } = made([new TypeError("reset"), [200, results(CANCELLED)]]);
  const buffer = client.buffer();
  buffer.add("a");
  assert.ok((await failureOf(buffer.close())).failed[0]!.error instanceof TokenCancelledError);
  assert.deepEqual([sent.length, tokensOf(sent)], [2, 1]);
});

test("a full buffer takes adds of its counters alone; failures that are not reported fill it too", async () => {
  const { client, sent } = made([[200, results(GONE)]]);
  const buffer = client.buffer({ maxItems: 1 });
  buffer.add("a", 1);
  assert.throws(() => buffer.add("b", 1), BufferFullError);
  assert.equal((await failureOf(buffer.flush())).failed.length, 1);
  buffer.add("b", 1);
  // It is sent at once, and refused within a few turns.
  for (let turn = 0; turn < 50; turn++) await new Promise(setImmediate);
  assert.equal(sent.length, 2);
  assert.throws(() => buffer.add("c", 1), BufferFullError);
  await assert.rejects(buffer.close(), NotCountedError);
  assert.throws(() => buffer.add("b", 1), ClosedError);
  assert.throws(() => client.buffer().add("", 1), RefusedError);
  assert.throws(() => client.buffer({ maxItems: 0 }), /maxItems is 0; it must be an integer, 1 or more/);
  assert.throws(() => client.buffer({ maxDelayMs: -1 }), /maxDelayMs is -1/);
});

test("a buffer that cannot send in time reports every add when it is closed", async () => {
  const { client, sent, clock } = made([[503, BUSY]], { deadlineMs: 3_000 });
  const buffer = client.buffer();
  for (let at = 0; at < 1_500; at++) buffer.add(`c-${at}`, 2);
  const { failed } = await failureOf(buffer.close());
  assert.equal(clock.now(), 3_000);
  assert.deepEqual(failed.map(({ counter }) => counter), Array.from({ length: 1_500 }, (_, at) => `c-${at}`));
  assert.ok(failed.slice(0, 1_000).every(({ error }) => error instanceof UnknownOutcomeError));
  assert.ok(failed.slice(1_000).every(({ error }) => error instanceof UnsentError));
  assert.equal(tokensOf(sent), 1_000);
  await buffer.close();
});

test("an aborted flush leaves the adds in the buffer, and an aborted close reports them", async () => {
  const { client, sent } = made([[503, BUSY], COUNTED, [503, BUSY]]);
  const buffer = client.buffer();
  buffer.add("a");
  await assert.rejects(buffer.flush({ signal: AbortSignal.abort() }), UnavailableError);
  await buffer.flush();
  assert.equal(tokensOf(sent), 1);
  buffer.add("a");
  const { failed } = await failureOf(buffer.close({ signal: AbortSignal.abort() }));
  assert.ok(failed[0]!.error instanceof UnsentError);
});

test("a refusal of a whole batch ends a flush, and the adds are sent again under their token", async () => {
  const { client, sent } = made([[404, GONE], [403, "a page"], COUNTED]);
  const buffer = client.buffer();
  buffer.add("a");
  await assert.rejects(buffer.flush(), (error) => error instanceof UnavailableError && /gone/.test(error.message));
  await assert.rejects(buffer.flush(), /a page/);
  await buffer.flush();
  assert.deepEqual([sent.length, tokensOf(sent)], [3, 1]);
});

test("a refusal of a whole batch ends a close, which reports what was refused", async () => {
  const { client, sent } = made([[404, GONE]]);
  const buffer = client.buffer();
  buffer.add("a");
  const { failed } = await failureOf(buffer.close());
  assert.equal((failed[0]!.error as RefusedError).code, "namespace_unknown");
  assert.equal(sent.length, 1);
  const lost = made([new TypeError("reset"), [404, GONE]]).client.buffer();
  lost.add("a");
  assert.ok((await failureOf(lost.close())).failed[0]!.error instanceof UnknownOutcomeError);
});

const UNCONNECTED = Object.assign(new Error("connection refused"), { syscall: "connect" });
const FORGOTTEN = { code: "token_too_old", retry: "never", applied: null, detail: "too old" };
const NONE: Scripted = [404, "no tokens"];

test("a refusal of a whole batch counts nothing, and a page in place of one may", async () => {
  for (const [answers, kind] of [
    [[[404, GONE], [200, results(GONE)]], RefusedError],
    [[[403, "a page"], [200, results(GONE)]], UnknownOutcomeError],
    [[new TypeError("reset"), [404, GONE], [200, results(GONE)]], UnknownOutcomeError],
  ] as const) {
    const buffer = made(answers).client.buffer();
    buffer.add("a");
    await assert.rejects(buffer.flush(), UnavailableError);
    assert.ok((await failureOf(buffer.flush())).failed[0]!.error instanceof kind);
  }
});

test("a token that was never counted is renewed when it is too old, and another one is not", async () => {
  const never = made([UNCONNECTED, UNCONNECTED, [200, results(FORGOTTEN)], NONE, COUNTED]);
  const buffer = never.client.buffer();
  buffer.add("a");
  await buffer.flush();
  const sent = never.sent.filter(({ path }) => path.endsWith("/batch/add"));
  assert.deepEqual([sent.length, tokensOf(sent), tokensOf(sent.slice(0, 3))], [4, 2, 1]);
  const lost = made([new TypeError("reset"), [200, results(FORGOTTEN)]]).client.buffer();
  lost.add("a");
  assert.ok((await failureOf(lost.flush())).failed[0]!.error instanceof UnknownOutcomeError);
});

test("a token that was never counted is renewed before it is honoured no more", async () => {
  const { client, sent, clock } = made([[404, { ...GONE, retry_after: 3600 }, { "idempotency-ttl": "60" }], NONE, COUNTED]);
  clock.beginMs = Date.now();
  const buffer = client.buffer();
  buffer.add("a");
  await assert.rejects(buffer.flush(), /gone/);
  await buffer.flush();
  assert.deepEqual([sent.length, tokensOf([sent[0]!, sent[2]!])], [3, 2]);
});

test("the shortest wait that its items ask for is that of a batch", async () => {
  const { client, sent } = made([[200, results({ ...BUSY, retry_after: 3600 }, { ...BUSY, retry_after: 1 })], COUNTED]);
  const buffer = client.buffer();
  for (const counter of ["a", "b"]) buffer.add(counter);
  await buffer.flush();
  assert.deepEqual(sent.map(({ atMs }) => atMs), [0, 1_100]);
});

test("a total of more than 64 bits is sent in parts, under a token each", async () => {
  const { client, sent } = made([COUNTED]);
  const buffer = client.buffer();
  for (let at = 0; at < 3; at++) buffer.add("a", 2n ** 63n - 1n);
  for (let at = 0; at < 2; at++) buffer.add("b", -(2n ** 63n));
  await buffer[Symbol.asyncDispose]();
  assert.equal(sent[0]!.body.match(/"delta":9223372036854775807,/g)!.length, 3);
  assert.equal(sent[0]!.body.match(/"delta":-9223372036854775808,/g)!.length, 2);
  assert.equal(tokensOf(sent), 5);
});

test("items that are too many for a body or for the service are sent in several batches", async () => {
  const limited: Scripted = [400, { code: "invalid_body", retry: "never", applied: null, field: "items" }];
  const { client, sent } = made([limited, [413, { ...GONE, code: "body_too_large" }], COUNTED]);
  const buffer = client.buffer();
  for (let at = 0; at < 8; at++) buffer.add(`c-${at}`);
  await buffer.flush();
  assert.deepEqual(sent.map((each) => itemsOf(each).length), [8, 4, 2, 2, 2, 2]);
  assert.equal(tokensOf(sent), 8);
  const long = made([COUNTED]);
  const found = await long.client.batch(Array.from({ length: 1_000 }, (_, at) => [`🙂`.repeat(250) + at, 1] as const));
  assert.equal(found.length, 1_000);
  assert.deepEqual(long.sent.map(({ body }) => Buffer.byteLength(body) <= 2 ** 20), [true, true]);
});
