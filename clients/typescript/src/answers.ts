/**
 * The service's answers. The readers throw for JSON that is not the answer to the request: a proxy, or another service,
 * may answer with any JSON.
 */

import { integer, list, record, stringifiable, text } from "./json.js";
import { type Credential, holdId, parseHold, parseTime, Token } from "./tokens.js";
import type { Item } from "./unfinished.js";

/** An add that is counted once. Times are RFC 3339 in UTC with microseconds, which a Date cannot hold. */
export interface Added {
  readonly counter: string;
  readonly delta: bigint;
  readonly eventTime: string;
  /** Whether it was counted before; null if the store cannot know. */
  readonly replayed: boolean | null;
  /** False in a BEST_EFFORT namespace, where a retry may count twice. */
  readonly retrySafe: boolean;
}

/** An add, and the count including it, exact as of `asOf`. */
export interface AddedCount extends Added {
  readonly count: bigint;
  readonly asOf: string;
}

/** A counter that is 0 as of `eventTime`. */
export type Cleared = Omit<Added, "delta" | "retrySafe">;

/** An add, a clear or a delete that counts nothing and never will; the same for every retry. */
export interface Cancelled {
  /** Whether it was counted before. */
  readonly wasCounted: boolean;
  readonly eventTime: string;
}

/** A count, and the instant it is exact as of. */
export interface Count {
  readonly counter: string;
  readonly count: bigint;
  readonly asOf: string;
  readonly accuracy: "accurate" | "eventual" | "best_effort";
  /**
   * What open holds of positive amounts reserve, and what those of negative ones do: of an accurate count; others
   * have 0.
   */
  readonly held: bigint;
  readonly heldDown: bigint;
}

/** A hold: open, or with its end. */
export interface HoldState {
  readonly id: string;
  readonly counter: string;
  readonly amount: bigint;
  readonly state: "open" | "settled" | "released" | "expired";
  /** Of an open one. */
  readonly expiresAt?: string;
  /** Of one that has ended. */
  readonly endedAt?: string;
  /** Of one that was settled: what counts. */
  readonly settled?: bigint;
  /** Whether more was settled than was held. */
  readonly over: boolean;
}

/** A hold, and its counter right after the call, exact as of `asOf`. */
export interface HoldCount extends HoldState {
  readonly count: bigint;
  /** What open holds that go the same way reserve together. */
  readonly held: bigint;
  readonly asOf: string;
}

/** How much a count changed from `from` to `to`, and what it was just before `to`. */
export interface Change {
  readonly counter: string;
  readonly from: string;
  readonly to: string;
  readonly count: bigint;
  readonly delta: bigint;
}

/** The sum of `counters` counters; every add up to `asOf` is in it. */
export interface Sum {
  readonly count: bigint;
  readonly counters: number;
  readonly asOf: string;
  /** `accurate` if each of them is. */
  readonly accuracy: Count["accuracy"];
}

/** The count at the end of a step of a history, and its change since the step began. */
export interface Point {
  readonly time: string;
  readonly count: bigint;
  readonly delta: bigint;
}

/** One add or clear of the event log. */
export interface CounterEvent {
  readonly eventTime: string;
  readonly eventId: string;
  readonly eventItemKey: number;
  /** 0 for a clear, and for an add that was refused. */
  readonly delta: bigint;
  readonly clear: boolean;
  /** The bounds of the add, if it has any. */
  readonly atLeast?: bigint;
  readonly atMost?: bigint;
  /** Only of an add that was refused because of a bound. */
  readonly refused?: RefusedAdd;
}

/** An add of the event log that was refused because of a bound. */
export interface RefusedAdd {
  /** What it was to add. */
  readonly delta: bigint;
  /** The count that decided, of the counter that had no room. */
  readonly count: bigint;
  /** The bound that was reached, if it is the least count. */
  readonly atLeast?: bigint;
  /** The bound that was reached, if it is the greatest count. */
  readonly atMost?: bigint;
}

/** A counter, its adds and clears a second, and its count. */
export interface Busy {
  readonly counter: string;
  readonly addsPerS: number;
  readonly count: bigint;
}

/** The busiest counters from `since` to `asOf`, busiest first. */
export interface Busiest {
  readonly since: string;
  readonly asOf: string;
  /** Whether all counters that changed in that time were considered. */
  readonly complete: boolean;
  readonly counters: readonly Busy[];
}

/** One page of a list, and the key of the next one; null if it is the last. */
export interface Page<T> {
  readonly found: readonly T[];
  readonly next: string | null;
}

/** The outcome of an add: it is counted, or never will be. */
export interface Resolved {
  readonly applied: boolean;
  /** Why it was not applied; an add with a new token is safe then. */
  readonly detail: string;
}

/** What the answer to an add or a clear must repeat. */
export interface Asked {
  readonly namespace: string;
  readonly counter: string;
  readonly delta: bigint;
  /** The token's time; null for a key, whose time the service chooses. */
  readonly timeUs: bigint | null;
  /** The id of a hold; null if a key's time is a part of it. */
  readonly hold: string | null;
}

/** Reads the answer to what was asked of each counter. */
export type Read<T> = (json: unknown, asked: readonly Asked[]) => T;

export function askedOf(namespace: string, [counter, delta]: Item, token: Credential): Asked {
  const isToken = token instanceof Token;
  const hold = isToken ? holdId(token, counter) : null;
  return { namespace, counter, delta, timeUs: isToken ? token.generationTimeUs : null, hold };
}

/** What reads the answer to each operation. */
export const READERS: {
  readonly add: Read<Added>;
  readonly "add-and-get": Read<AddedCount>;
  readonly clear: Read<Cleared>;
  readonly delete: Read<Cleared>;
  readonly "atomic/add": Read<Added[]>;
  readonly hold: Read<HoldCount>;
  readonly settle: Read<HoldCount>;
  readonly release: Read<HoldCount>;
} = {
  add: (json, [asked]) => addedOf(json, asked!),
  "add-and-get": (json, [asked]) => {
    const { count, as_of } = record(json);
    return stringifiable({ ...addedOf(json, asked!), count: integer(count), asOf: time(as_of) });
  },
  clear: (json, [asked]) => clearedOf(json, asked!),
  delete: (json, [asked]) => clearedOf(json, asked!),
  "atomic/add": (json, asked) => eachOf(json, asked, addedOf),
  hold: (json, [asked]) => holdCountOf(json, asked!, "open"),
  settle: (json, [asked]) => holdCountOf(json, asked!, "settled"),
  release: (json, [asked]) => holdCountOf(json, asked!, "released"),
};

/** Read the answer to a cancel. */
export const cancelledOf: Read<Cancelled> = (json, [asked]) => {
  const { cancelled, was_counted, event_time } = record(json);
  if (cancelled !== true) throw new TypeError("it is about something else");
  return { wasCounted: boolean(was_counted), eventTime: eventTimeOf(event_time, asked!) };
};

export function addedOf(json: unknown, asked: Asked): Added {
  const { delta, retry_safe } = record(json);
  if (integer(delta) !== asked.delta) throw new TypeError("it is about another delta");
  return stringifiable({ ...clearedOf(json, asked), delta: asked.delta, retrySafe: retry_safe !== false });
}

function clearedOf(json: unknown, asked: Asked): Cleared {
  const { event_time, replayed, retry_safe } = record(json);
  about(json, asked.namespace, asked.counter);
  if (replayed !== null && typeof replayed !== "boolean") throw new TypeError("replayed");
  if (retry_safe !== undefined && typeof retry_safe !== "boolean") throw new TypeError("retry_safe");
  // BEST_EFFORT ignores tokens.
  const eventTime = retry_safe === false ? time(event_time) : eventTimeOf(event_time, asked);
  return { counter: asked.counter, eventTime, replayed };
}

/** Read the event time, which is that of the token that was sent. */
function eventTimeOf(value: unknown, { timeUs }: Asked): string {
  if (timeUs !== null && parseTime(time(value)) !== timeUs) throw new TypeError("it is about another token");
  return time(value);
}

/** Read the answer to what left a hold in `state`; a settled one with the amount asked for. */
function holdCountOf(json: unknown, asked: Asked, state: HoldState["state"]): HoldCount {
  const { count, held, as_of } = record(json);
  const found = holdOf(json, asked.namespace, asked.hold ?? undefined);
  if (found.state !== state || found.counter !== asked.counter) throw new TypeError("it is about another hold");
  const amount = state === "open" ? found.amount : state === "settled" ? found.settled : asked.delta;
  if (amount !== asked.delta) throw new TypeError("it is about another amount");
  return stringifiable({ ...found, count: integer(count), held: integer(held), asOf: time(as_of) });
}

/** Read a hold, of any id if `asked` is not given. */
export function holdOf(json: unknown, namespace: string, asked?: string): HoldState {
  const { hold, counter, amount, state, expires_at, ended_at, settled, over = false } = record(json);
  const id = text(hold);
  about(json, namespace, parseHold(id).counter);
  if (asked !== undefined && id !== asked) throw new TypeError("it is about another hold");
  if (state !== "open" && state !== "settled" && state !== "released" && state !== "expired") {
    throw new TypeError("its state is unknown");
  }
  return stringifiable({
    ...{ id, counter: text(counter), amount: integer(amount), state },
    ...(state === "open" ? { expiresAt: time(expires_at) } : { endedAt: time(ended_at) }),
    ...(state === "settled" ? { settled: integer(settled) } : {}),
    over: boolean(over),
  });
}

/** Read a count, of any counter of the namespace if `asked` is not given. */
export function countOf(json: unknown, namespace: string, asked?: string): Count {
  const { counter, count, as_of, accuracy, held = 0, held_down: down = 0 } = record(json);
  about(json, namespace, asked ?? text(counter));
  return stringifiable({
    counter: text(counter),
    count: integer(count),
    asOf: time(as_of),
    accuracy: accuracyOf(accuracy),
    held: integer(held),
    heldDown: integer(down),
  });
}

function accuracyOf(value: unknown): Count["accuracy"] {
  if (value === "accurate" || value === "eventual" || value === "best_effort") return value;
  throw new TypeError("its accuracy is unknown");
}

export function changeOf(json: unknown, namespace: string, counter: string): Change {
  const { count, asOf } = countOf(json, namespace, counter);
  const { from, delta } = record(json);
  return stringifiable({ counter, from: time(from), to: asOf, count, delta: integer(delta) });
}

/** Read the sum that comes with a list of counters. */
export function sumOf(json: unknown): Sum {
  const { count, counters, as_of, accuracy } = record(record(json)["sum"]);
  return stringifiable({
    count: integer(count),
    counters: Number(integer(counters)),
    asOf: time(as_of),
    accuracy: accuracyOf(accuracy),
  });
}

export function pointOf(json: unknown): Point {
  const { time: at, count, delta } = record(json);
  return stringifiable({ time: time(at), count: integer(count), delta: integer(delta) });
}

export function eventOf(json: unknown): CounterEvent {
  const { event_time, event_id, event_item_key, delta = 0, clear = false, refused } = record(json);
  return stringifiable({
    eventTime: time(event_time),
    eventId: text(event_id),
    eventItemKey: Number(integer(event_item_key)),
    delta: integer(delta),
    clear: boolean(clear),
    ...boundsOf(json),
    ...(refused === undefined ? {} : { refused: refusedOf(refused) }),
  });
}

function refusedOf(json: unknown): RefusedAdd {
  const { delta, count } = record(json);
  const bounds = boundsOf(json);
  if (bounds.atLeast === undefined && bounds.atMost === undefined) throw new TypeError("it has no bound");
  return { delta: integer(delta), count: integer(count), ...bounds };
}

function boundsOf(json: unknown): Pick<CounterEvent, "atLeast" | "atMost"> {
  const { at_least: least, at_most: most } = record(json);
  return {
    ...(least === undefined ? {} : { atLeast: integer(least) }),
    ...(most === undefined ? {} : { atMost: integer(most) }),
  };
}

export function busiestOf(json: unknown): Busiest {
  const { since, as_of, complete, counters } = record(json);
  const busy = list(counters).map((each): Busy => {
    const { counter, adds_per_s, count } = record(each);
    return stringifiable({ counter: text(counter), addsPerS: number(adds_per_s), count: integer(count) });
  });
  return { since: time(since), asOf: time(as_of), complete: boolean(complete), counters: busy };
}

/** Read the page of `name`, each item of which `read` reads. */
export function pageOf<T>(json: unknown, name: string, read: (item: unknown) => T): Page<T> {
  const { next_page: next } = record(json);
  return { found: list(record(json)[name]).map(read), next: next === null ? null : text(next) };
}

/** Read the result of each of `asked`. */
export function eachOf<A, T>(json: unknown, asked: readonly A[], read: (result: unknown, one: A) => T): T[] {
  const results = list(record(json)["results"]);
  if (results.length !== asked.length) throw new TypeError("it has another number of results");
  return asked.map((one, at) => read(results[at], one));
}

/** Read `count` tokens. */
export function tokensOf(json: unknown, count: number): Token[] {
  const found = list(record(json)["tokens"]).map((each) => {
    const { token, generation_time } = record(each);
    return new Token(text(token), parseTime(time(generation_time))!);
  });
  if (found.length !== count) throw new TypeError("it has another number of tokens");
  return found;
}

function about(json: unknown, namespace: string, counter: string): void {
  const found = record(json);
  if (found["namespace"] !== namespace || found["counter"] !== counter) {
    throw new TypeError("it is about another counter");
  }
}

function time(value: unknown): string {
  if (parseTime(text(value)) === null) throw new TypeError("it is not a time");
  return text(value);
}

function boolean(value: unknown): boolean {
  if (typeof value === "boolean") return value;
  throw new TypeError("it is not true or false");
}

function number(value: unknown): number {
  if (typeof value === "number" || typeof value === "bigint") return Number(value);
  throw new TypeError("it is not a number");
}
