/** The conformance program: clients/conformance/README.md has its protocol. */

import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";

import {
  type Added,
  type BoundedAddOptions,
  BoundReachedError,
  type Bounds,
  type Count,
  CounterClient,
  CounterError,
  type CounterEvent,
  type Credential,
  type HoldCount,
  HoldSettledError,
  type HoldState,
  Key,
  type NotCounted,
  NotCountedError,
  RefusedError,
  type Settings,
  Token,
  UnavailableError,
  UnknownOutcomeError,
  UnsentError,
} from "../src/node.js";
import { parseTime } from "../src/tokens.js";

const AT_ONCE = 32;
type Json = any;

function settings(args: string[]): Settings {
  const given = new Map<string, string>();
  for (let at = 0; at < args.length; at += 2) given.set(args[at]!.replace(/^--/, ""), args[at + 1]!);
  const keyFile = given.get("api-key-file");
  const durations = {
    deadlineMs: "timeout",
    attemptTimeoutMs: "attempt-timeout",
    backoffFirstMs: "backoff-first",
    backoffMaxMs: "backoff-max",
  };
  const options: Record<string, number> = {};
  for (const [name, flag] of Object.entries(durations)) {
    const value = given.get(flag);
    if (value !== undefined) options[name] = parseFloat(value) * (value.endsWith("ms") ? 1 : 1000);
  }
  if (given.has("retries")) options["retriesAtOnce"] = Number(given.get("retries"));
  return {
    url: given.get("url")!,
    namespace: given.get("namespace")!,
    ...(keyFile === undefined ? {} : { apiKey: readFileSync(keyFile, "utf8").trim() }),
    ...options,
  };
}

function credentialOf({ token, key }: Json): { token?: Credential } {
  if (key !== undefined) return { token: Token.fromKey(key) };
  if (token === undefined) return {};
  return { token: new Token(token.token, parseTime(token.generation_time)!) };
}

function shown(credential: Credential): Json {
  if (credential instanceof Key) return { key: credential.text };
  return { token: { token: credential.nonce, generation_time: credential.generationTime } };
}

function boundsOf({ at_least: least, at_most: most }: Json): Bounds {
  return {
    ...(least === undefined ? {} : { atLeast: BigInt(least) }),
    ...(most === undefined ? {} : { atMost: BigInt(most) }),
  };
}

function optionsOf(command: Json): BoundedAddOptions {
  return { ...credentialOf(command), ...boundsOf(command) };
}

function itemsOf(items: Json[]): [string, bigint, Bounds][] {
  return items.map((item) => [item.counter, BigInt(item.delta), boundsOf(item)]);
}

async function run(client: CounterClient, command: Json): Promise<Json> {
  const { counter, prefix, from, to, tz, limit, max_staleness: maxStaleness } = command;
  switch (command.do) {
    case "add":
      return { replayed: (await client.add(counter, BigInt(command.delta), optionsOf(command))).replayed };
    case "add_and_get": {
      const { replayed, count } = await client.addAndGet(counter, BigInt(command.delta), optionsOf(command));
      return { replayed, count: count.toString() };
    }
    case "delete":
      return { replayed: (await client.delete(counter, credentialOf(command))).replayed };
    case "clear":
      return { replayed: (await client.clear(counter, credentialOf(command))).replayed };
    case "atomic": {
      const added = await client.atomic(itemsOf(command.items), credentialOf(command));
      return { replayed: added.map(({ replayed }) => replayed) };
    }
    case "batch": {
      const results = await client.batch(itemsOf(command.items));
      return { results: results.map((each) => (each instanceof CounterError ? endOf(each) : doneOf(each))) };
    }
    case "get": {
      const { count, accuracy, held, heldDown } = await client.get(counter, { maxStaleness });
      const shown = (amount: bigint) => (amount === 0n ? undefined : amount.toString());
      return { count: count.toString(), accuracy, held: shown(held), held_down: shown(heldDown) };
    }
    case "hold": {
      const given = { ...optionsOf(command), expiresIn: command.expires_in };
      const { began } = await client.hold(counter, BigInt(command.amount), given);
      return { hold: began.id, amount: began.amount.toString(), ...sumsOf(began) };
    }
    case "settle": {
      const found = await client.settleHold(command.hold, BigInt(command.amount));
      return { settled: found.settled?.toString(), over: found.over, ...sumsOf(found) };
    }
    case "release":
      return sumsOf(await client.releaseHold(command.hold));
    case "extend":
      return heldOf(await client.extendHold(command.hold, command.expires_in));
    case "get_hold":
      return heldOf(await client.getHold(command.hold));
    case "holds":
      return { holds: (await all(client.holds(counter))).map(heldOf) };
    case "get_many":
      return { counts: (await client.getMany(command.counters, { maxStaleness })).map(countOf) };
    case "names":
      return { counters: await all(client.names({ prefix })) };
    case "list": {
      const found = client.list({ prefix, largestFirst: command.order === "-count", maxStaleness, limit });
      return { counts: (await all(found)).map(countOf) };
    }
    case "sum": {
      const { count, counters } = await client.sum(prefix, { maxStaleness });
      return { sum: count.toString(), counters };
    }
    case "between": {
      const { count, delta } = await client.between(counter, from, to, { tz });
      return { count: count.toString(), delta: delta.toString() };
    }
    case "history": {
      const points = await client.history(counter, { from, to, step: command.step, tz });
      const shown = points.map(({ time, count, delta }) => {
        return { time, count: count.toString(), delta: delta.toString() };
      });
      return { points: shown };
    }
    case "events": {
      const events = await all(client.events(counter, { from, to, limit }));
      return { events: events.map(eventOf) };
    }
    case "live":
      for await (const found of client.live(counter)) {
        if (!(found instanceof CounterError) && found.count === BigInt(command.until)) {
          return { count: found.count.toString() };
        }
      }
      throw new Error("a stream without a signal ended");
    case "busiest": {
      const { counters } = await client.busiest(limit, { span: command.span });
      return { counters: counters.map(({ counter, count }) => ({ counter, count: count.toString() })) };
    }
    case "recount":
      return { windows: await client.recount(counter) };
    case "tokens":
      return { tokens: (await client.tokens(command.number)).length };
    case "namespaces":
      return { namespaces: (await client.namespaces()).map(({ namespace }) => namespace) };
    case "namespace":
      return { counter_type: (await client.settings()).counter_type };
    case "create_namespace":
      return { counter_type: (await client.createNamespace(command.settings)).counter_type };
    case "change_namespace":
      return { counter_type: (await client.changeNamespace(command.settings)).counter_type };
    case "delete_namespace":
      await client.deleteNamespace();
      return {};
    case "buffer": {
      const buffer = client.buffer({ maxDelayMs: 60_000 });
      for (const [name, delta] of itemsOf(command.items)) buffer.add(name, delta);
      const failed = await buffer.close().then(() => [], failuresOf);
      const shown = failed.map(({ counter, delta, error }) => {
        return { counter, delta: delta.toString(), ...endOf(error) };
      });
      return { failed: shown };
    }
    case "resolve":
      return { applied: (await client.resolve(command.unfinished)).applied };
    case "cancel":
      return { was_counted: (await client.cancel(command.unfinished)).wasCounted };
    case "new":
      return shown(Token.new());
    case "parse":
      return shown(Token.parse(command.text));
    case "derive":
      return shown(credentialOf(command).token!.derive(command.label));
  }
  throw new Error(`unknown command ${command.do}`);
}

async function all<T>(found: AsyncIterable<T>): Promise<T[]> {
  const items: T[] = [];
  for await (const each of found) items.push(each);
  return items;
}

function countOf({ counter, count, accuracy }: Count): Json {
  return { counter, count: count.toString(), accuracy };
}

function sumsOf({ count, held }: HoldCount): Json {
  return { count: count.toString(), held: held.toString() };
}

function heldOf({ id, amount, state, over, settled, expiresAt, endedAt }: HoldState): Json {
  const times = { expires_at: expiresAt, ended_at: endedAt };
  return { hold: id, amount: amount.toString(), state, over, settled: settled?.toString(), ...times };
}

function eventOf(event: CounterEvent): Json {
  const { eventTime, eventId, eventItemKey, delta, clear, refused } = event;
  const ids = { event_time: eventTime, event_id: eventId, event_item_key: eventItemKey };
  const why = refused && { delta: refused.delta.toString(), count: refused.count.toString(), ...textsOf(refused) };
  return { ...ids, delta: delta.toString(), clear, ...textsOf(event), refused: why };
}

/** Return bounds as text; those that are undefined are not written. */
function textsOf({ atLeast, atMost }: { atLeast?: bigint | undefined; atMost?: bigint | undefined }): Json {
  return { at_least: atLeast?.toString(), at_most: atMost?.toString() };
}

function failuresOf(error: unknown): readonly NotCounted[] {
  if (error instanceof NotCountedError) return error.failed;
  throw error;
}

function doneOf({ replayed }: Added): Json {
  return { outcome: "done", replayed };
}

/** Return what a refusal because of a bound says, if it says all; and what was settled. */
function reachedOf(error: RefusedError): Json {
  if (error instanceof HoldSettledError) return { settled: error.settled?.toString() };
  if (!(error instanceof BoundReachedError)) return {};
  const { counter, count, held, room, atLeast, atMost } = error;
  if (counter === undefined || count === undefined || room === undefined) return {};
  if (atLeast === undefined && atMost === undefined) return {};
  return { counter, count: count.toString(), held: held?.toString(), room: room.toString(), ...textsOf(error) };
}

function endOf(error: unknown): Json {
  if (error instanceof RefusedError) {
    return { outcome: "refused", code: error.code, applied: error.applied, ...reachedOf(error) };
  }
  if (error instanceof UnknownOutcomeError || error instanceof UnsentError) {
    return { outcome: error.sent ? "unknown" : "unsent", unfinished: String(error.unfinished) };
  }
  if (error instanceof UnavailableError) return { outcome: error.sent ? "unknown" : "unsent" };
  throw error;
}

// Node loads fetch when it is first called, which takes longer than the deadlines of some runs.
await fetch("data:,");
const client = new CounterClient(settings(process.argv.slice(2)));
const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();

async function work(): Promise<void> {
  for (let line = await lines.next(); !line.done; line = await lines.next()) {
    if (line.value === "") continue;
    const { id, ...command } = JSON.parse(line.value);
    const outcome = await run(client, command).then((found) => ({ outcome: "done", ...found }), endOf);
    process.stdout.write(`${JSON.stringify({ id, ...outcome })}\n`);
  }
}

await Promise.all(Array.from({ length: AT_ONCE }, work));
