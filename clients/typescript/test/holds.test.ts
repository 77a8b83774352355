import assert from "node:assert/strict";
import { test } from "node:test";

import { parseJson } from "../src/json.js";
import {
  BoundReachedError,
  HoldEndedError,
  HoldReleasedError,
  HoldSettledError,
  RefusedError,
  Token,
  Unfinished,
  UnknownOutcomeError,
} from "../src/node.js";
import { holdId } from "../src/tokens.js";
import { BUSY, GONE, made, NO_RETRIES, type Sent } from "./fakes.js";

const SETTLED = { code: "hold_settled", retry: "never", applied: true, detail: "settled", settled: 7 };
const RELEASED = { code: "hold_released", retry: "never", applied: false, detail: "released" };
const UNKNOWN = { code: "hold_unknown", retry: "never", applied: null, detail: "unknown" };
const REACHED = { code: "bound_reached", retry: "never", applied: false, detail: "no room", count: 8, held: 2n ** 64n };
const RESET = new TypeError("reset");
const TIME = "2026-01-31T08:30:30.000250Z";
const ID = holdId(new Token("5f3a0f0e-6f0c-4f7e-9d3b-0c5f1d2e3a4b", 1_769_847_330_000_250n), "c");

/** Answer what leaves a hold of 50 of counter c in the state that the request asks for. */
function held({ path, body }: Sent): unknown {
  const { amount, idempotency_token: token } = parseJson(body) as any;
  const parts = path.split("/");
  const hold = token ? holdId(Token.parse(`${token.token}@${token.generation_time}`) as Token, "c") : parts[5];
  const states: Record<string, object> = {
    settle: { state: "settled", ended_at: TIME, settled: amount },
    release: { state: "released", ended_at: TIME },
  };
  const state = states[parts.at(-1)!] ?? { state: "open", expires_at: TIME };
  const whose = { namespace: "default", counter: "c", hold, amount: 50 };
  return { ...whose, ...state, count: 2n ** 64n, held: 50, as_of: TIME };
}

function calls(sent: Sent[]): string[] {
  return sent.map(({ path }) => path.split("/").at(-1)!);
}

test("a hold is settled, and leaving it does nothing then", async () => {
  const { client, sent } = made([RESET, [201, held], RESET, [503, BUSY], [200, held]]);
  const hold = await client.hold("c", 50, { expiresIn: "15m", atMost: 1000 });
  assert.deepEqual([hold.began.amount, hold.began.count, hold.began.state], [50n, 2n ** 64n, "open"]);
  assert.equal(sent[0]!.body, sent[1]!.body);
  assert.match(sent[0]!.body, /^\{"amount":50,"at_most":1000,"expires_in":"15m","idem/);
  assert.equal((await hold.settle(37)).settled, 37n);
  await hold[Symbol.asyncDispose]();
  assert.deepEqual(calls(sent), ["holds", "holds", "settle", "settle", "settle"]);
});

test("withHold releases whatever the error is, and throws that of the work", async () => {
  const failed = new Error("the model failed");
  for (const end of [[200, held], [410, RELEASED], [409, SETTLED], [404, GONE]] as const) {
    const { client, sent } = made([[201, held], end]);
    const work = client.withHold("c", 50, { expiresIn: "1m" }, () => Promise.reject(failed));
    await assert.rejects(work, (error) => error === failed);
    assert.deepEqual(calls(sent), ["holds", "release"]);
  }
  const { client, sent } = made([[201, held], [404, GONE]]);
  await assert.rejects(client.withHold("c", 50, { expiresIn: "1m" }, async () => 1), RefusedError);
  const other = made([[201, held]]);
  assert.equal(await other.client.withHold("c", 50, { expiresIn: "1m" }, async (hold) => (await hold.settle(3)).over), false);
  assert.deepEqual([...calls(sent), ...calls(other.sent)], ["holds", "release", "holds", "settle"]);
  const full = made([[409, REACHED]]);
  const error = await full.client.withHold("c", 50, { expiresIn: "1m" }, async () => assert.fail()).catch((error: unknown) => error);
  assert.ok(error instanceof BoundReachedError && error.held === 2n ** 64n);
});

test("a settle that may count is not released", async () => {
  const { client, sent } = made([[201, held], RESET, [200, held]], NO_RETRIES);
  const hold = await client.hold("c", 50, { expiresIn: "1m" });
  const error = await hold.settle(37).catch((error: unknown) => error);
  assert.ok(error instanceof UnknownOutcomeError);
  assert.match(error.message, /whether the token's settle is done/);
  await hold.leave();
  assert.deepEqual(calls(sent), ["holds", "settle"]);
  const text = String(error.unfinished);
  assert.equal(String(Unfinished.parse(text)), text);
  assert.deepEqual(await client.resolve(text), { applied: true, detail: "" });
  assert.equal(sent[1]!.body, sent[2]!.body);
  assert.equal(sent[1]!.path, sent[2]!.path);
  await assert.rejects(client.cancel(text), { code: "invalid_parameter" });
  // One that was refused for certain is released.
  const refused = made([[201, held], [404, UNKNOWN], [200, held]]);
  const second = await refused.client.hold("c", 50, { expiresIn: "1m" });
  await assert.rejects(second.settle(-1), { code: "hold_unknown" });
  await second.leave();
  assert.deepEqual(calls(refused.sent), ["holds", "settle", "release"]);
});

test("the end of a hold is definite whatever came before", async () => {
  for (const before of [[], [RESET]]) {
    const error = await made([...before, [409, SETTLED]]).client.releaseHold(ID).catch((error: unknown) => error);
    assert.ok(error instanceof HoldSettledError && error instanceof HoldEndedError);
    assert.deepEqual([error.settled, error.applied], [7n, true]);
    await assert.rejects(made([...before, [410, RELEASED]]).client.extendHold(ID, "1m"), HoldReleasedError);
  }
  const bare = await made([[409, { ...SETTLED, settled: "7" }]]).client.getHold(ID).catch((error: unknown) => error);
  assert.ok(bare instanceof HoldSettledError && bare.settled === undefined);
  const { client, sent } = made([[200, held]]);
  for (const other of ["", "AAAA", `${ID}=`, "a/b", 7 as any]) {
    await assert.rejects(client.getHold(other), { code: "invalid_parameter" });
    await assert.rejects(client.settleHold(other, 1), { code: "invalid_parameter" });
  }
  for (const expiresIn of [900, "", undefined] as any[]) {
    await assert.rejects(client.hold("c", 1, { expiresIn }), { code: "invalid_parameter" });
    const what = { operation: "hold", items: [["c", 1]], token: Token.new(), expiresIn } as const;
    await assert.rejects(client.cancel(what), { code: "invalid_parameter" });
  }
  assert.equal(sent.length, 0);
});

test("an unfinished hold is resolved and cancelled", async () => {
  const { client, sent } = made([RESET], NO_RETRIES);
  const token = Token.new();
  const bounds = { atLeast: -9 };
  const error = await client.hold("c", 50, { expiresIn: "15m", token, ...bounds }).catch((error: unknown) => error);
  assert.ok(error instanceof UnknownOutcomeError);
  const text = String(error.unfinished);
  assert.match(text, /"expires_in":"15m"/);
  assert.equal(String(Unfinished.parse(text)), text);
  await assert.rejects(client.resolve(text), UnknownOutcomeError);
  await assert.rejects(client.cancel(text), UnknownOutcomeError);
  const items = [["c", 50, bounds]] as const;
  await assert.rejects(client.cancel({ operation: "hold", items, token, expiresIn: "15m" }), UnknownOutcomeError);
  const [first, again, cancelled, other] = sent.map(({ body }) => JSON.parse(body));
  assert.deepEqual(again, first);
  assert.deepEqual(cancelled, { ...first, operation: "hold" });
  assert.deepEqual(other, cancelled);
  assert.deepEqual(calls(sent), ["holds", "holds", "cancel", "cancel"]);
});
