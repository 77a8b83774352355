/** The vectors that all clients share, and the parts they are about. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { integer, parseJson, writeJson } from "../src/json.js";
import { optionsOf } from "../src/options.js";
import { Budget, pauseMs } from "../src/retrying.js";
import { Token } from "../src/node.js";

function vectors(name: string): any {
  return JSON.parse(readFileSync(new URL(`../../../conformance/vectors/${name}.json`, import.meta.url), "utf8"));
}

test("pauses are within their bounds", () => {
  const found = vectors("retries");
  const options = optionsOf({ random: () => 1 });
  for (const { attempts, pause_max_s } of found.backoff) {
    assert.equal(pauseMs(options, attempts, 0), pause_max_s * 1000);
    assert.equal(pauseMs({ ...options, random: () => 0 }, attempts, 250), 250);
  }
});

test("the retry budget gives what it should, step by step", () => {
  for (const each of vectors("retries").budgets) {
    const budget = new Budget(each.retries_at_once, each.retries_per_s, each.retries_per_call, 0);
    for (const step of each.steps) {
      if (step.call) budget.call();
      else {
        const wait = budget.take(step.now_s * 1000, step.wait_max_s * 1000);
        assert.equal(wait === null ? null : wait / 1000, step.wait_s);
      }
    }
  }
});

test("tokens are read and derived as everywhere", () => {
  for (const { text, refused } of vectors("tokens")) {
    if (refused) assert.throws(() => Token.parse(text), { code: "invalid_parameter" }, text);
    else Token.parse(text);
  }
  const token = Token.parse("5f3a0f0e-6f0c-4f7e-9d3b-0c5f1d2e3a4b@2026-01-31T08:15:30.000250Z");
  assert.equal(String(token.derive("a")), "42edf30c-f570-cc9f-a3b7-4111063b84b8@2026-01-31T08:15:30.000250Z");
});

test("JSON keeps large integers, and whatever looks like one in text", () => {
  const text = String.raw`{"a":[123456789012345678901,-9007199254740993],"b":"1234567890123456789","c\"9007199254740993":1.5}`;
  const found = parseJson(text);
  assert.deepEqual(found, {
    a: [123456789012345678901n, -9007199254740993n],
    b: "1234567890123456789",
    'c"9007199254740993': 1.5,
  });
  assert.equal(writeJson(found), text);
  assert.deepEqual(parseJson('["bigint:1", 1234567890123456789]'), ["bigint:1", 1234567890123456789n]);
  assert.throws(() => parseJson("00000000000000000001"), SyntaxError);
});

/** In quadratic time this would take a quarter of an hour. */
test("JSON of an answer is read in linear time, whatever it holds", () => {
  const large = "1234567890123456";
  const bytes = 1024 * 1024;
  const hostile = {
    marks: `["bigint${":".repeat(bytes)}",${large}]`,
    colons: `{"a${":".repeat(bytes)}":${large}}`,
    quotes: `["${'\\"'.repeat(bytes / 2)}",${large}]`,
    spaces: `["a"${" ".repeat(bytes)},${large}]`,
    strings: `[${'"",'.repeat(bytes / 3)}${large}]`,
    brackets: `${"[".repeat(bytes / 2)}${large}${"]".repeat(bytes / 2)}`,
    numbers: `[${"1,".repeat(bytes / 2)}${large}]`,
    records: `[${'{"a":1},'.repeat(bytes / 8)}${large}]`,
    digits: `[${"9".repeat(bytes)}]`,
    keys: `{${Array.from({ length: 10_000 }, (_, at) => `"${"9".repeat(20)}${at}":${large}`).join(",")}}`,
  };
  for (const text of Object.values(hostile)) {
    try {
      parseJson(text);
    } catch (error) {
      // Nested too deeply.
      assert.ok(error instanceof SyntaxError);
    }
  }
  assert.throws(() => integer(parseJson("9".repeat(1_001))), TypeError);
  assert.equal(integer(parseJson("9".repeat(1_000))), 10n ** 1_000n - 1n);
});

test("JSON is read as JSON.parse reads it, and nothing else is", () => {
  const pieces = [
    ...["{", "}", "[", "]", ",", ":", '"', "\\", " ", "\n", "-", "0", "1", "1.5", "e3", "E-2", ".", "+", "true", "false"],
    ...["null", '"a":', '"b"', "[]", "{}", "1,", "\\u00e9", "\\n", "\u0001", "\u00a0", "tru", "00", "\ud83d", '"\\q"', "é"],
  ];
  // A generator of its own, so that a failure repeats.
  let state = 1;
  const draw = (most: number): number => (state = (state * 48_271) % 2_147_483_647) % most;
  const begins = ["", "[", '{"a":', '["', "[1,"];
  const ends = ["", "]", "}", '"]', "]}"];
  let read = 0;
  for (let round = 0; round < 20_000; round++) {
    const middle = Array.from({ length: draw(6) }, () => pieces[draw(pieces.length)]).join("");
    const text = begins[draw(begins.length)]! + middle + ends[draw(ends.length)]!;
    let expected: unknown;
    try {
      expected = JSON.parse(text);
    } catch {
      assert.throws(() => parseJson(text), SyntaxError, text);
      continue;
    }
    read += 1;
    assert.deepEqual(parseJson(text), expected, text);
  }
  assert.ok(read > 300);
  const member = parseJson('{"__proto__": {"code": 1}, "a": 2}') as Record<string, unknown>;
  assert.deepEqual([member["code"], member["a"], Object.getPrototypeOf(member)], [undefined, 2, Object.prototype]);
});
