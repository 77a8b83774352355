/**
 * The service's answers. The readers throw for JSON that is not the answer to the request: a proxy, or another service,
 * may answer with any JSON.
 */

import { integer, list, record, stringifiable, text } from "./json.js";
import { type Credential, parseTime, Token } from "./tokens.js";
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

/** A count, and the instant it is exact as of. */
export interface Count {
  readonly counter: string;
  readonly count: bigint;
  readonly asOf: string;
  readonly accuracy: "accurate" | "eventual" | "best_effort";
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
}

/** Reads the answer to what was asked of each counter. */
export type Read<T> = (json: unknown, asked: readonly Asked[]) => T;

export function askedOf(namespace: string, [counter, delta]: Item, token: Credential): Asked {
  return { namespace, counter, delta, timeUs: token instanceof Token ? token.generationTimeUs : null };
}

/** What reads the answer to each operation. */
export const READERS: {
  readonly add: Read<Added>;
  readonly "add-and-get": Read<AddedCount>;
  readonly clear: Read<Cleared>;
  readonly delete: Read<Cleared>;
  readonly "atomic/add": Read<Added[]>;
} = {
  add: (json, [asked]) => addedOf(json, asked!),
  "add-and-get": (json, [asked]) => {
    const { count, as_of } = record(json);
    return stringifiable({ ...addedOf(json, asked!), count: integer(count), asOf: time(as_of) });
  },
  clear: (json, [asked]) => clearedOf(json, asked!),
  delete: (json, [asked]) => clearedOf(json, asked!),
  "atomic/add": (json, asked) => eachOf(json, asked, addedOf),
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
  const eventTime = time(event_time);
  // BEST_EFFORT ignores tokens.
  if (retry_safe !== false && asked.timeUs !== null && parseTime(eventTime) !== asked.timeUs) {
    throw new TypeError("it is about another token");
  }
  return { counter: asked.counter, eventTime, replayed };
}

export function countOf(json: unknown, namespace: string, counter: string): Count {
  about(json, namespace, counter);
  const { count, as_of, accuracy } = record(json);
  if (accuracy !== "accurate" && accuracy !== "eventual" && accuracy !== "best_effort") {
    throw new TypeError("its accuracy is unknown");
  }
  return stringifiable({ counter, count: integer(count), asOf: time(as_of), accuracy });
}

/** Read the result of each of `asked`. */
export function eachOf<A, T>(json: unknown, asked: readonly A[], read: (result: unknown, one: A) => T): T[] {
  const results = list(record(json)["results"]);
  if (results.length !== asked.length) throw new TypeError("it has another number of results");
  return asked.map((one, at) => read(results[at], one));
}

/** Return the times of `count` tokens in microseconds, or null if it is no answer to that. */
export function timesOf(json: unknown, count: number): bigint[] | null {
  try {
    const found = list(record(json)["tokens"]).map((each) => parseTime(time(record(each)["generation_time"]))!);
    return found.length === count ? found : null;
  } catch {
    return null;
  }
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
