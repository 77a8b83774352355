/** The ends of a call other than success. Each says what it promises about the add. */

import type { Credential } from "./tokens.js";
import type { Unfinished } from "./unfinished.js";

export type Retry = "same_token" | "new_token" | "never";

/** The base of all errors of this client. */
export class CounterError extends Error {
  override name = "CounterError";
}

/**
 * A definite refusal: this call counted nothing, and no retry of it will.
 *
 * The service refused (then `problem` has its answer), or the client refused an argument; then `code`
 * is `invalid_parameter` and nothing was sent.
 */
export class RefusedError extends CounterError {
  override name = "RefusedError";
  constructor(
    message: string,
    readonly code: string,
    /** Whether the token's add is counted, by another call; null if the service did not say. */
    readonly applied: boolean | null = null,
    readonly retry: Retry = "never",
    readonly problem: Readonly<Record<string, unknown>> = {},
  ) {
    super(message);
  }
}

/** The token was cancelled: its add does not count and never will. */
export class TokenCancelledError extends RefusedError {
  override name = "TokenCancelledError";
}

/**
 * The add was refused because of a bound: it does not count and never will, though there may be room later. A member is
 * undefined if the answer does not say.
 */
export class BoundReachedError extends RefusedError {
  override name = "BoundReachedError";

  /** The counter whose bound was reached. */
  get counter(): string | undefined {
    const { counter } = this.problem;
    return typeof counter === "string" ? counter : undefined;
  }

  /** The count that decided, without the add. */
  get count(): bigint | undefined {
    return this.#integer("count");
  }

  /** The bound that was reached, if it is the least count. */
  get atLeast(): bigint | undefined {
    return this.#integer("at_least");
  }

  /** The bound that was reached, if it is the greatest count. */
  get atMost(): bigint | undefined {
    return this.#integer("at_most");
  }

  /** What open holds that go the same way reserved, if anything. */
  get held(): bigint | undefined {
    return this.#integer("held");
  }

  /** The largest amount that could have been added, or taken away, instead. */
  get room(): bigint | undefined {
    return this.#integer("room");
  }

  #integer(name: string): bigint | undefined {
    return integerOf(this.problem[name]);
  }
}

/** The hold has ended otherwise; the code is `hold_settled`, `hold_released` or `hold_expired`. */
export class HoldEndedError extends RefusedError {
  override name = "HoldEndedError";
}

/** The hold was settled, with `settled`. */
export class HoldSettledError extends HoldEndedError {
  override name = "HoldSettledError";

  /** What counts; undefined if the answer does not say. */
  get settled(): bigint | undefined {
    return integerOf(this.problem["settled"]);
  }
}

/** The hold was released: if the work was done, count its cost with an add. */
export class HoldReleasedError extends HoldEndedError {
  override name = "HoldReleasedError";
}

/** The hold has expired: if the work was done, count its cost with an add. */
export class HoldExpiredError extends HoldEndedError {
  override name = "HoldExpiredError";
}

function integerOf(value: unknown): bigint | undefined {
  return typeof value === "bigint" || Number.isSafeInteger(value) ? BigInt(value as number | bigint) : undefined;
}

/** There is no definite answer: the service cannot be reached, or something else answers. */
export class UnavailableError extends CounterError {
  override name = "UnavailableError";
  constructor(
    message: string,
    /** False if no attempt had a connection. */
    readonly sent: boolean,
    cause?: unknown,
  ) {
    super(message, cause === undefined ? undefined : { cause });
  }
}

/**
 * It is not known whether the add is counted; it is at most once. Of `client.cancel`: whether it is cancelled.
 *
 * Store `String(error.unfinished)` and pass it to `client.resolve`, or send the same add again with
 * `token: error.token`.
 */
export class UnknownOutcomeError extends UnavailableError {
  override name = "UnknownOutcomeError";
  constructor(
    message: string,
    readonly unfinished: Unfinished,
    cause?: unknown,
  ) {
    super(message, true, cause);
  }

  get token(): Credential {
    return this.unfinished.token;
  }
}

/** No attempt had a connection, or those that had one were refused: this call counted nothing. */
export class UnsentError extends UnavailableError {
  override name = "UnsentError";
  constructor(
    message: string,
    readonly unfinished: Unfinished,
    cause?: unknown,
  ) {
    super(message, false, cause);
  }

  get token(): Credential {
    return this.unfinished.token;
  }
}

/** An add to a buffer that is not counted for sure: `error` says what is known of it. */
export interface NotCounted {
  readonly counter: string;
  readonly delta: bigint;
  readonly error: CounterError;
}

/** Some adds of a buffer are not counted, or not for sure; all others before it are. */
export class NotCountedError extends CounterError {
  override name = "NotCountedError";
  constructor(readonly failed: readonly NotCounted[]) {
    const [{ counter, error }] = failed as [NotCounted];
    const first = `the first one of counter ${shown(counter)}: ${error.message}`;
    super(`${failed.length} items of the buffer are not counted for sure, ${first}`, { cause: error });
  }
}

/** A buffer has no room for another counter. */
export class BufferFullError extends CounterError {
  override name = "BufferFullError";
}

/** The buffer is closed; make another one. */
export class ClosedError extends CounterError {
  override name = "ClosedError";
}

/** Return the refusal of an invalid argument. */
export function invalid(message: string): RefusedError {
  return new RefusedError(message, "invalid_parameter");
}

/** Return the beginning of `value`, for an error. */
export function shown(value: unknown): string {
  return (typeof value === "bigint" ? value.toString() : (JSON.stringify(value) ?? String(value))).slice(0, 80);
}
