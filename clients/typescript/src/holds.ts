/** Holds: amounts that are reserved until they are settled, released, or expire. */

import { type HoldCount, type HoldState, holdOf, type Page, pageOf } from "./answers.js";
import { checkedName } from "./arguments.js";
import { type Calls, get, post, query } from "./calls.js";
import { HoldEndedError, invalid, RefusedError, shown } from "./errors.js";
import type { Ask, CallOptions } from "./reads.js";
import type { Call } from "./retrying.js";
import { parseHold } from "./tokens.js";

/** What a hold does by its id: a CounterClient. */
export interface Ends {
  settleHold(hold: string, amount: number | bigint, options?: CallOptions): Promise<HoldCount>;
  releaseHold(hold: string, options?: CallOptions): Promise<HoldCount>;
  extendHold(hold: string, expiresIn: string, options?: CallOptions): Promise<HoldState>;
}

/**
 * An open hold, of `client.hold`. `await using` releases it at the end of its block, unless it was settled.
 *
 * If it is not known whether a settle succeeded, the hold is left as it is: a release could win, and the cost would be
 * lost. Settle it again, or pass the error to `client.resolve`.
 */
export class Hold {
  /** Whether it has neither ended nor may be settled. */
  #isOpen = true;

  constructor(
    private readonly client: Ends,
    /** The hold and its counter right after it began. */
    readonly began: HoldCount,
  ) {}

  get id(): string {
    return this.began.id;
  }

  /** Count what the work cost, 0 or with the sign of the hold, and end the hold; as `client.settleHold`. */
  async settle(amount: number | bigint, options: CallOptions = {}): Promise<HoldCount> {
    this.#isOpen = false;
    try {
      return await this.client.settleHold(this.id, amount, options);
    } catch (error) {
      this.#isOpen = error instanceof RefusedError && !(error instanceof HoldEndedError);
      throw error;
    }
  }

  /** Give everything back; as `client.releaseHold`. */
  async release(options: CallOptions = {}): Promise<HoldCount> {
    try {
      const released = await this.client.releaseHold(this.id, options);
      this.#isOpen = false;
      return released;
    } catch (error) {
      if (error instanceof HoldEndedError) this.#isOpen = false;
      throw error;
    }
  }

  /** Let it expire so long from now, or when no hold may live longer; never earlier. */
  extend(expiresIn: string, options: CallOptions = {}): Promise<HoldState> {
    return this.client.extendHold(this.id, expiresIn, options);
  }

  /** Release it unless it has ended, or may be settled. */
  async leave(): Promise<void> {
    if (!this.#isOpen) return;
    try {
      await this.release();
    } catch (error) {
      // It may have been ended by its id.
      if (!(error instanceof HoldEndedError)) throw error;
    }
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.leave();
  }
}

/** Call `use`, then leave the hold; the error of `use` is thrown rather than that of a release. */
export async function using<T>(hold: Hold, use: (hold: Hold) => Promise<T>): Promise<T> {
  let isFailed = false;
  try {
    return await use(hold);
  } catch (error) {
    isFailed = true;
    throw error;
  } finally {
    const left = hold.leave();
    // What cannot be released expires by itself.
    await (isFailed ? left.catch(() => undefined) : left);
  }
}

/** Read a hold, or change when it expires. */
export function state(calls: Calls, hold: string, expiresIn?: string): Call<HoldState> {
  checkedName(parseHold(hold).counter);
  const path = `${calls.base}/holds/${hold}`;
  const read = (json: unknown): HoldState => holdOf(json, calls.namespace, hold);
  if (expiresIn === undefined) return { request: get(path), read };
  const body = { expires_in: checkedDuration(expiresIn) };
  return { request: { ...post(path, body, { writes: true }), method: "PATCH" }, read };
}

export function open(calls: Calls, counter: string): Ask<HoldState> {
  checkedName(counter);
  return (page, limit) => ({
    request: get(`${calls.base}/holds${query({ counter, limit, page })}`, { many: true }),
    read: (json): Page<HoldState> => pageOf(json, "holds", (each) => holdOf(each, calls.namespace)),
  });
}

/** Return `text` if it is text: what durations there are is the service's to say. */
export function checkedDuration(text: string): string {
  if (typeof text === "string" && text !== "") return text;
  throw invalid(`expiresIn is ${shown(text)}; give text, such as 15m`);
}
