import assert from "node:assert/strict";
import { test } from "node:test";
import { inspect } from "node:util";

import {
  CounterClient,
  CounterError,
  RefusedError,
  Token,
  TokenCancelledError,
  UnavailableError,
  UnknownOutcomeError,
  UnsentError,
} from "../src/node.js";
import { stringifiable } from "../src/json.js";
import { added, BUSY, CANCELLED, GONE, made, results, type Sent, VOID } from "./fakes.js";

function tokensOf(sent: Sent[]): string[] {
  return sent.map((each) => JSON.parse(each.body).idempotency_token?.token);
}

test("a retry sends the same token", async () => {
  const { client, sent } = made([new TypeError("reset"), [503, BUSY], [200, added]]);
  assert.equal((await client.add("c", 1)).delta, 1n);
  assert.equal(sent.length, 3);
  assert.equal(new Set(tokensOf(sent)).size, 1);
});

test("after an attempt without an answer, or a fault of a server, the next URL has its turn", async () => {
  const url = ["http://one", "http://two", "http://three"];
  const lost = new TypeError("reset");
  const { client, sent } = made([lost, [503, BUSY], [200, added], [200, added], lost, [429, BUSY], [200, added]], { url });
  await client.add("c", 1);
  assert.equal(new Set(tokensOf(sent)).size, 1);
  await client.add("c", 1);
  await client.add("c", 1);
  assert.deepEqual(sent.map(({ host }) => host), ["one", "two", "three", "three", "three", "one", "one"]);
  assert.throws(() => new CounterClient({ url: [] }), /there is no URL/);
});

test("what a server does not support is refused, and the next call asks the same one", async () => {
  const unsupported = { code: "not_supported", retry: "never", applied: null, detail: "it keeps no events" };
  const { client, sent } = made([[501, unsupported], [501, "a page"], [200, added]], { url: ["http://one", "http://two"] });
  await assert.rejects(client.add("c", 1), /it keeps no events/);
  await assert.rejects(client.add("c", 1), /status 501/);
  await client.add("c", 1);
  assert.deepEqual(sent.map(({ host }) => host), ["one", "one", "one"]);
});

test("pauses grow exponentially, and are at least what the service asks", async () => {
  const { client, sent } = made([[503, BUSY], [503, BUSY], [503, { ...BUSY, retry_after: 2 }], [200, added]]);
  await client.add("c", 1);
  assert.deepEqual(sent.map(({ atMs }) => atMs), [0, 100, 300, 2_700]);
});

test("a call ends before a pause that would pass its deadline", async () => {
  const { client, sent, clock } = made([[429, BUSY, { "retry-after": "31" }]]);
  await assert.rejects(client.add("c", 1), UnknownOutcomeError);
  assert.deepEqual([sent.length, clock.now()], [1, 0]);
});

test("all calls share the retry budget", async () => {
  const { client, sent } = made([[503, BUSY]], { retriesAtOnce: 3, retriesPerS: 0, retriesPerCall: 0 });
  for (let call = 0; call < 4; call++) await assert.rejects(client.add("c", 1), /used up/);
  assert.equal(sent.length, 4 + 3);
});

test("an attempt without an answer ends at its time limit, and is sent again", async () => {
  const { client, sent } = made(["silence", [200, added]]);
  await client.add("c", 1);
  assert.deepEqual(sent.map(({ atMs }) => atMs), [0, 5_100]);
});

test("an outcome that is not known has the token, and resolve finishes it", async () => {
  const { client, sent } = made([["silence"], ["silence"], [410, VOID]].flat(1) as never, { deadlineMs: 5_050 });
  const error = await client.add("c", 1).catch((each: unknown) => each);
  assert.ok(error instanceof UnknownOutcomeError);
  assert.equal(String(error.token).split("@")[0], tokensOf(sent)[0]);
});

test("resolve returns whether the add is counted", async () => {
  const token = Token.new();
  const { client } = made([[404, "a page"], [200, added], [410, VOID]]);
  const error = (await client.add("c", 1, { token }).catch((each: unknown) => each)) as UnknownOutcomeError;
  assert.ok(error instanceof UnknownOutcomeError);
  assert.deepEqual(await client.resolve(String(error.unfinished)), { applied: true, detail: "" });
  assert.deepEqual(await client.resolve(error), { applied: false, detail: "void" });
});

test("no connection: nothing was sent", async () => {
  for (const cause of [
    ...["ECONNREFUSED", "EHOSTUNREACH", "ENETUNREACH", "ETIMEDOUT"].map((code) => ({ code, syscall: "connect" })),
    { code: "ENOTFOUND", syscall: "getaddrinfo" },
    { code: "UND_ERR_CONNECT_TIMEOUT" },
    { code: "ECONNREFUSED", errors: [{ code: "ECONNREFUSED", syscall: "connect" }] },
  ]) {
    const { client } = made([Object.assign(new TypeError("fetch failed"), { cause })]);
    await assert.rejects(client.add("c", 1), UnsentError);
    await assert.rejects(client.get("c"), (error) => error instanceof UnavailableError && !error.sent);
  }
});

test("a connection that fails later may have sent something, whatever the code is", async () => {
  for (const code of ["EHOSTUNREACH", "ENETUNREACH", "ECONNREFUSED", "EADDRNOTAVAIL", "ETIMEDOUT", "ECONNRESET"]) {
    for (const cause of [{ code, syscall: "read" }, { code, syscall: "write" }, { code }]) {
      const { client } = made([Object.assign(new TypeError("fetch failed"), { cause })]);
      await assert.rejects(client.add("c", 1), UnknownOutcomeError, code);
    }
  }
});

test("a port that fetch never connects to is refused at once", async () => {
  for (const port of [1, 22, 6000, 6667, 10080]) {
    const url = `http://127.0.0.1:${port}`;
    await assert.rejects(fetch(url), (error: Error) => (error.cause as Error).message === "bad port");
    assert.throws(() => new CounterClient({ url }), { code: "invalid_parameter", message: RegExp(`port ${port}`) });
    assert.throws(() => new CounterClient({ url: ["http://127.0.0.1", url] }), RefusedError);
  }
  for (const port of ["", ":443", ":8080", ":8443"]) new CounterClient({ url: `https://127.0.0.1${port}` });
});

test("a void token of the client's own is replaced by one with the service's time", async () => {
  const fresh = { token: "5f3a0f0e-6f0c-4f7e-9d3b-0c5f1d2e3a4b", generation_time: "2026-01-31T08:15:30.000250Z" };
  const { client, sent } = made([[410, VOID], [200, { tokens: [fresh] }], [200, added]]);
  await client.add("c", 1);
  assert.equal(sent[1]!.path, "/v1/tokens");
  assert.equal(JSON.parse(sent[2]!.body).idempotency_token.generation_time, fresh.generation_time);
  assert.equal(new Set([tokensOf(sent)[0], tokensOf(sent)[2], fresh.token]).size, 3);
});

test("a new token is made after the pause, which may be longer than a token is accepted", async () => {
  const { client, sent, clock } = made([...Array(6).fill([503, BUSY]), [410, VOID], [404, "a page"], [200, added]]);
  await client.add("c", 1);
  assert.deepEqual(sent.slice(-2).map(({ path }) => path.split("/").at(-1)), ["tokens", "add"]);
  assert.equal(sent.at(-2)!.atMs, clock.now());
});

test("a void token that cannot be replaced in time is a definite answer", async () => {
  const { client } = made([[503, BUSY], [410, VOID]], { retriesAtOnce: 1, retriesPerS: 0, retriesPerCall: 0 });
  await assert.rejects(client.add("c", 1), { code: "token_too_old", applied: false });
  const batches = made([[200, { results: [VOID] }]], { retriesAtOnce: 0, retriesPerS: 0, retriesPerCall: 0 });
  const [result] = await batches.client.batch([["c", 1]]);
  assert.equal((result as RefusedError).code, "token_too_old");
});

test("a refusal of the program's token is definite", async () => {
  const { client, sent } = made([[410, VOID]]);
  await assert.rejects(client.add("c", 1, { token: Token.new() }), { code: "token_too_old", applied: false });
  assert.equal(sent.length, 1);
});

test("a refused retry leaves the outcome unknown, which is no definite refusal", async () => {
  const { client } = made([new TypeError("reset"), [404, GONE]]);
  const error = await client.add("c", 1).catch((each: unknown) => each);
  assert.ok(error instanceof UnknownOutcomeError);
  assert.ok(!(error instanceof RefusedError || UnsentError.prototype instanceof RefusedError));
});

test("an add that was cancelled is not counted, whatever came before, and its token is not replaced", async () => {
  const { client, sent } = made([new TypeError("reset"), [410, CANCELLED]]);
  await assert.rejects(client.add("c", 1), (error) => error instanceof TokenCancelledError && error.applied === false);
  assert.equal(sent.length, 2);
  const batches = made([new TypeError("reset"), [200, results(CANCELLED)]]);
  assert.ok((await batches.client.batch([["c", 1]]))[0] instanceof TokenCancelledError);
  assert.equal(batches.sent.length, 2);
  await assert.rejects(made([[404, GONE]]).client.add("c", 1), (error) => !(error instanceof TokenCancelledError));
});

test("a cancel waits until the token is settled, and sends the same again", async () => {
  const pending = { code: "token_pending", retry: "same_token", applied: null, retry_after: 2 };
  const token = Token.new();
  const done = { cancelled: true, was_counted: true, event_time: token.generationTime };
  const { client, sent } = made([[503, pending], new TypeError("reset"), [200, done]]);
  const found = await client.cancel({ items: [["c", 3]], token });
  assert.deepEqual(found, { wasCounted: true, eventTime: token.generationTime });
  assert.equal(new Set(sent.map(({ body }) => body)).size, 1);
  assert.deepEqual([sent[0]!.path, sent[1]!.atMs], ["/v1/namespaces/default/counters/c/cancel", 2_100]);
});

test("a cancel without an answer has what to cancel again", async () => {
  const { client, sent } = made([new TypeError("reset")], { retriesAtOnce: 0, retriesPerS: 0, retriesPerCall: 0 });
  const clear = { operation: "clear", items: [["c", 0]], token: Token.fromKey("order-7") } as const;
  const error = (await client.cancel(clear).catch((each: unknown) => each)) as UnknownOutcomeError;
  assert.match(error.message, /clear is cancelled.*cancel it again$/);
  await assert.rejects(client.cancel(error), UnknownOutcomeError);
  await assert.rejects(client.cancel(String(error.unfinished)), UnknownOutcomeError);
  assert.deepEqual(sent.map(({ body }) => body), Array(3).fill('{"operation":"clear"}'));
  assert.equal(sent[2]!.headers["idempotency-key"], "order-7");
  const ended = { signal: AbortSignal.abort() };
  await assert.rejects(client.cancel(error, ended), { name: "UnsentError", message: /the cancel of .*clear was not sent/ });
  const two = [["a", 1], ["b", 2]] as const;
  await assert.rejects(client.cancel({ items: two, token: Token.new() }), { code: "invalid_parameter" });
  await assert.rejects(client.cancel({ operation: "atomic/add", items: two, token: Token.new() }), UnknownOutcomeError);
  assert.equal(sent[3]!.path, "/v1/namespaces/default/atomic/cancel");
});

test("an aborted call ends at once, in a pause as well", async () => {
  const ended = new AbortController();
  const { client, clock } = made([[503, BUSY, { "retry-after": "20" }]]);
  const call = client.add("c", 1, { signal: ended.signal });
  clock.hold = true;
  setImmediate(() => ended.abort());
  await assert.rejects(call, UnknownOutcomeError);
  await assert.rejects(client.add("c", 1, { signal: ended.signal }), UnsentError);
});

test("counts over 2**53 are exact", async () => {
  const body = '{"namespace":"default","counter":"c","count":18446744073709551617,"as_of":"2026-01-31T08:15:30Z","accuracy":"accurate"}';
  const { client, sent } = made([[200, body], [200, added]]);
  assert.equal((await client.get("c")).count, 2n ** 64n + 1n);
  await client.add("c", 2n ** 63n - 1n);
  assert.match(sent[1]!.body, /"delta":9223372036854775807,/);
  await assert.rejects(client.add("c", 2 ** 53), RefusedError);
});

test("an answer over its bound is not read to its end", async () => {
  const { client, sent } = made([[200, "9".repeat(70_000)], [200, added]]);
  await client.add("c", 1);
  assert.equal(sent.length, 2);
});

test("a redirect is not followed", async () => {
  const { client, sent } = made([[307, "", { location: "http://other.test/" }]]);
  await assert.rejects(client.add("c", 1), /redirect/);
  assert.deepEqual([sent.length, sent[0]!.redirect], [1, "manual"]);
});

test("the API key is in no error and in no printed client", async () => {
  const { client, sent } = made([[404, "you sent ck_secret"]], { apiKey: "ck_secret" });
  const error = await client.add("c", 1).catch((each: unknown) => each);
  assert.equal(sent[0]!.headers["authorization"], "Bearer ck_secret");
  assert.doesNotMatch(inspect([error, client], { depth: 10, showHidden: true }), /ck_secret/);
  assert.throws(() => made([], { apiKey: "ck_secret\n" }), (each) => !inspect(each).includes("ck_secret"));
});

test("a batch sends again what has no outcome, and nothing else", async () => {
  const fresh = { token: "5f3a0f0e-6f0c-4f7e-9d3b-0c5f1d2e3a4b", generation_time: "2026-01-31T08:15:30.000250Z" };
  const { client, sent } = made([
    [200, results("added", BUSY, GONE, VOID)],
    [200, { tokens: [fresh] }],
    [200, results("added", "added")],
  ]);
  const found = await client.batch([["a", 1], ["b", 2], ["c", 3], ["d", 4]]);
  assert.deepEqual(found.map((each) => each instanceof CounterError), [false, false, true, false]);
  const items = sent.filter(({ path }) => path.endsWith("batch/add")).map(({ body }) => JSON.parse(body).items);
  assert.deepEqual(items[1].map(({ counter }: { counter: string }) => counter), ["b", "d"]);
  assert.equal(items[1][0].idempotency_token.token, items[0][1].idempotency_token.token);
  assert.equal(items[1][1].idempotency_token.generation_time, fresh.generation_time);
});

test("names that a URL cannot carry are refused in paths, and go by atomic", async () => {
  const { client, sent } = made([[200, results("added")]]);
  await assert.rejects(client.add("..", 1), /use atomic/);
  await client.atomic([["..", 1]]);
  assert.equal(sent[0]!.path, "/v1/namespaces/default/atomic/add");
});

test("JSON.stringify takes a result, and rounds no integer", async () => {
  const count = { namespace: "default", counter: "c", as_of: "2026-01-31T08:15:30.004711Z", accuracy: "accurate" };
  const { client } = made([[200, added], [200, { ...count, count: 3 }]]);
  const { eventTime } = JSON.parse(JSON.stringify(await client.add("c", 1)));
  assert.match(eventTime, /^2/);
  const text = '{"counter":"c","count":3,"asOf":"2026-01-31T08:15:30.004711Z","accuracy":"accurate","held":0,"heldDown":0}';
  assert.equal(JSON.stringify(await client.get("c")), text);
  for (const [value, written] of [[2n ** 53n - 1n, "9007199254740991"], [2n ** 53n, '"9007199254740992"'], [-(2n ** 63n), '"-9223372036854775808"']]) {
    assert.equal(JSON.stringify(stringifiable({ count: value })), `{"count":${written}}`);
  }
});
