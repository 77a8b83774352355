/** What the client checks before it sends anything. Each check throws RefusedError. */

import { invalid, shown } from "./errors.js";
import { parseTime } from "./tokens.js";
import type { Item, WireBounds } from "./unfinished.js";

const INT64_MAX = 2n ** 63n - 1n;
const NAME_CHARS_MAX = 256;
/** What no counter's name holds, as the service says; unlike \p{C} it is the same with every version of Node. */
const REFUSED = new RegExp(
  "[\\0-\\x1f\\x7f-\\xa0\\xad\\u061c\\u1680\\u180e\\u2000-\\u200b\\u200e\\u200f\\u2028-\\u202f\\u205f-\\u206f\\u3000" +
    "\\ud800-\\uf8ff\\ufeff\\ufff9-\\ufffb\\u{e0001}\\u{f0000}-\\u{10ffff}]",
  "u",
);

/** An add is refused if it would take the count below `atLeast` or above `atMost`. */
export interface Bounds {
  readonly atLeast?: number | bigint | undefined;
  readonly atMost?: number | bigint | undefined;
}

/** A counter, its delta, an integer of 64 bits, and the bounds of the add if it has any. */
export type Delta = readonly [counter: string, delta: number | bigint, bounds?: Bounds];

/** An instant: a Date, RFC 3339 text with an offset, or the beginning of the day in the time zone of the call. */
export type Moment = Date | "today" | (string & {});

export function checkedNamespace(namespace: string): string {
  if (/^[a-z][a-z0-9_-]{0,62}$/.test(namespace)) return namespace;
  throw invalid(
    `the namespace is ${shown(namespace)}; its name begins with a lower-case letter, and has up to 63` +
      " lower-case letters, digits, - and _",
  );
}

export function checkedDelta(delta: number | bigint, name = "delta"): bigint {
  const fits = typeof delta === "bigint" ? BigInt.asIntN(64, delta) === delta : Number.isSafeInteger(delta);
  if (fits) return BigInt(delta);
  throw invalid(
    `the ${name} is ${shown(delta)}; it must be a bigint of 64 bits, or a number that is an exact integer (under 2**53)`,
  );
}

/** Split `total` into integers of 64 bits. */
export function parts(total: bigint): bigint[] {
  const found: bigint[] = [];
  for (; total > INT64_MAX; total -= INT64_MAX) found.push(INT64_MAX);
  for (; total < -INT64_MAX - 1n; total += INT64_MAX + 1n) found.push(-INT64_MAX - 1n);
  return [...found, total];
}

export function checkedName(counter: string): string {
  const count = typeof counter === "string" ? [...counter].length : 0;
  if (count < 1 || count > NAME_CHARS_MAX) {
    throw invalid(`a counter's name has 1 to ${NAME_CHARS_MAX} characters, this one has ${count}`);
  }
  const bad = REFUSED.exec(counter);
  if (bad !== null) {
    const code = bad[0].codePointAt(0)!.toString(16).toUpperCase().padStart(4, "0");
    throw invalid(
      "a counter's name has no controls, invisible marks, characters for private use, or spaces but U+0020; this one" +
        ` holds U+${code}`,
    );
  }
  return counter;
}

export function checkedNames(counters: Iterable<string>): string[] {
  if (typeof counters === "string") throw invalid(`the counters are the text ${shown(counters)}; give a list of names`);
  return Array.from(counters, checkedName);
}

/** Return an add with its bounds, which may come with other options. */
export function checkedItem(counter: string, delta: number | bigint, { atLeast, atMost }: Bounds = {}): Item {
  const bounds: WireBounds = {
    ...(atLeast === undefined ? {} : { at_least: checkedDelta(atLeast, "atLeast") }),
    ...(atMost === undefined ? {} : { at_most: checkedDelta(atMost, "atMost") }),
  };
  const { at_least: least, at_most: most } = bounds;
  if (least !== undefined && most !== undefined && least > most) {
    throw invalid(`atLeast is ${least}, and atMost is ${most}: no count is both`);
  }
  const item = [checkedName(counter), checkedDelta(delta)] as const;
  return least === undefined && most === undefined ? item : [...item, bounds];
}

export function checkedItems(items: Iterable<Delta>, most: number): Item[] {
  const found = Array.from(items, ([counter, delta, bounds = {}]): Item => {
    const names = typeof bounds === "object" ? Object.keys(bounds) : [""];
    if (names.some((name) => name !== "atLeast" && name !== "atMost")) {
      throw invalid("the bounds of an item have other members than atLeast and atMost");
    }
    return checkedItem(counter, delta, bounds);
  });
  if (found.length < 1 || found.length > most) {
    throw invalid(`there are ${found.length} items; 1 to ${most} are allowed`);
  }
  return found;
}

/** Return `value` if it is an integer from `least` on. */
export function checkedInteger(name: string, value: number, least: number): number {
  if (Number.isSafeInteger(value) && value >= least) return value;
  throw invalid(`${name} is ${shown(value)}; it must be an integer, ${least} or more`);
}

export function momentText(moment: Moment): string {
  if (moment instanceof Date && !Number.isNaN(moment.getTime())) return moment.toISOString();
  if (moment === "today" || (typeof moment === "string" && parseTime(moment) !== null)) return moment;
  throw invalid(`${shown(moment)} is not a time; give a Date, RFC 3339 text with an offset, or "today"`);
}

/** Return `text` for a path or a query. */
export function escaped(text: string): string {
  if (/\p{Cs}/u.test(text)) throw invalid(`${shown(text)} is not valid text: it has a lone surrogate`);
  return encodeURIComponent(text).replace(/[!'()*]/g, (each) => {
    return `%${each.charCodeAt(0).toString(16).toUpperCase()}`;
  });
}
