/** A client's deadlines, pauses and retries, and what a test replaces. Times are in milliseconds. */

import { invalid } from "./errors.js";

/** Time and waiting. */
export interface Clock {
  /** Milliseconds that never go back. */
  now(): number;
  /** Milliseconds since 1970. */
  wallTime(): number;
  /** Call `then` after `ms`, unless the function returned is called before. Node does not wait for `background`. */
  after(ms: number, then: () => void, background?: boolean): () => void;
}

export interface Options {
  /** Limit on a whole call, including retries and pauses. */
  deadlineMs: number;
  /** Limit on one attempt; when it passes, the outcome is not known. */
  attemptTimeoutMs: number;
  /** The pause before retry n is drawn from 0 to `backoffFirstMs * 2**n`, ... */
  backoffFirstMs: number;
  /** ... or from 0 to this if that is less. */
  backoffMaxMs: number;
  /** The size of the retry budget that all calls of a client share, ... */
  retriesAtOnce: number;
  /** ... how many retries it regains a second, ... */
  retriesPerS: number;
  /** ... and with each call. The budget limits the load during an outage. */
  retriesPerCall: number;
  fetch: typeof fetch;
  clock: Clock;
  /** Returns a number from 0 to 1. */
  random: () => number;
}

const MS_MAX = 31 * 86_400_000;
const SYSTEM: Clock = {
  now: () => performance.now(),
  wallTime: () => Date.now(),
  after(ms, then, background = false) {
    // setTimeout fires at once if a delay does not fit 32 bits.
    const timer = setTimeout(then, Math.min(ms, 2 ** 31 - 1));
    // In browsers it is a number.
    if (background) timer.unref?.();
    return () => clearTimeout(timer);
  },
};

/** Return `given` with defaults. Throws RefusedError for a value out of its bounds. */
export function optionsOf(given: Partial<Options>): Options {
  const options: Options = {
    deadlineMs: 30_000,
    attemptTimeoutMs: 5_000,
    backoffFirstMs: 50,
    backoffMaxMs: 5_000,
    retriesAtOnce: 20,
    retriesPerS: 1,
    retriesPerCall: 0.2,
    fetch: (...sent) => fetch(...sent),
    clock: SYSTEM,
    random: Math.random,
    ...given,
  };
  for (const name of ["deadlineMs", "attemptTimeoutMs", "backoffFirstMs", "backoffMaxMs"] as const) {
    if (check(name, options[name], MS_MAX) === 0) throw invalid(`${name} is 0; it must be over 0`);
  }
  for (const name of ["retriesAtOnce", "retriesPerS", "retriesPerCall"] as const) {
    check(name, options[name], 1e9);
  }
  return options;
}

export function check(name: string, value: unknown, most: number): number {
  if (typeof value === "number" && value >= 0 && value <= most) return value;
  throw invalid(`${name} is ${String(value)}; it must be a number from 0 to ${most}`);
}
