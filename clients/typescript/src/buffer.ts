/// <reference lib="esnext.disposable" preserve="true" />

/** A buffer of adds, which merges those of a counter and sends the totals in batches. */

import { checkedDelta, checkedInteger, checkedName, parts } from "./arguments.js";
import { BATCH_ITEMS_MAX, type Calls } from "./calls.js";
import { Delivery } from "./delivery.js";
import {
  BufferFullError,
  ClosedError,
  CounterError,
  invalid,
  type NotCounted,
  NotCountedError,
  UnavailableError,
} from "./errors.js";
import { stringifiable } from "./json.js";
import { check } from "./options.js";
import type { CallOptions } from "./reads.js";
import { causeOf, Course, type Shared } from "./retrying.js";
import { Ending, type Failure } from "./transport.js";
import type { Item } from "./unfinished.js";

const DELAY_MS_MAX = 3_600_000;

export interface BufferOptions {
  /** How long adds are merged before they are sent; 100 by default. */
  readonly maxDelayMs?: number;
  /** How many counters can be pending, with the failures that are not reported yet; 100,000 by default. */
  readonly maxItems?: number;
}

/**
 * Merges adds, and sends the total of each counter under one token until its outcome is known: adds before a
 * successful `flush` are counted exactly once (except in a BEST_EFFORT namespace).
 *
 * Close it before the program ends: Node does not wait for adds that were not sent yet.
 */
export class AddBuffer {
  readonly #maxDelayMs: number;
  readonly #maxItems: number;
  readonly #open = new Map<string, bigint>();
  /** Counters in flight, and waiting behind them. */
  #held = 0;
  #failed: NotCounted[] = [];
  #sending = Promise.resolve();
  #cancelTimer: (() => void) | undefined;
  #isClosed = false;
  /** Called when the service refuses a whole batch. */
  readonly #refused = new Set<(cause: unknown) => void>();
  readonly #ended = new AbortController();

  constructor(
    private readonly calls: Calls,
    private readonly shared: Shared,
    { maxDelayMs = 100, maxItems = 100_000 }: BufferOptions,
  ) {
    this.#maxDelayMs = check("maxDelayMs", maxDelayMs, DELAY_MS_MAX);
    this.#maxItems = checkedInteger("maxItems", maxItems, 1);
  }

  /**
   * Add `delta` to the pending total of `counter`. Throws BufferFullError if there is no room for another counter,
   * ClosedError after `close`, and RefusedError for an invalid argument. It takes no bounds, because adds are merged:
   * use `client.add` or `client.batch`. In a namespace with bounds the total is accepted or refused.
   */
  add(counter: string, delta: number | bigint = 1, ...bounds: never[]): void {
    if (bounds.length > 0) throw invalid("a buffer merges adds, so it takes no bounds: use add or batch");
    const checked = checkedDelta(delta);
    if (this.#isClosed) throw new ClosedError("the buffer is closed; make another one");
    const total = this.#open.get(counter);
    if (total === undefined) {
      checkedName(counter);
      if (this.#pending >= this.#maxItems) {
        throw new BufferFullError(
          `${this.#maxItems} counters wait to be sent, or their failures to be reported by flush: add later, or` +
            " raise maxItems",
        );
      }
    }
    this.#open.set(counter, (total ?? 0n) + checked);
    if (total === undefined) this.#plan();
  }

  /**
   * Wait until the outcome of each add so far is known. Rejects with NotCountedError for those that are not counted
   * for sure, each of which is reported once; with UnavailableError if `signal` aborts, or the service refuses a whole
   * batch: the adds stay in the buffer.
   */
  async flush({ signal }: CallOptions = {}): Promise<void> {
    await this.#settled(signal);
    this.#report();
  }

  /**
   * Take no more adds, send the rest within the client's `deadlineMs`, until `signal` aborts or the service refuses a
   * whole batch. Rejects with NotCountedError for what is not counted for sure.
   */
  async close({ signal }: CallOptions = {}): Promise<void> {
    this.#isClosed = true;
    const { clock, deadlineMs } = this.shared.options;
    const ending = new Ending(clock, signal, this.#ended);
    this.#refused.add(() => ending.abort());
    await ending.within(deadlineMs, () => this.#send());
    ending.abort();
    this.#report();
  }

  /** `await using buffer = client.buffer()` closes it. */
  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }

  #report(): void {
    const failed = this.#failed;
    this.#failed = [];
    if (failed.length > 0) throw new NotCountedError(failed);
  }

  /** Wait until the outcome of each add so far is known. Rejects as `flush`. */
  async #settled(signal: AbortSignal | undefined): Promise<void> {
    let stop: (cause: unknown) => void = () => {};
    const stopped = new Promise<never>((_, reject) => {
      stop = (cause) => {
        const why = cause instanceof Error ? cause.message : String(cause);
        reject(new UnavailableError(`adds stay in the buffer, and are sent again: ${why}`, true, cause));
      };
    });
    const abort = (): void => stop(signal?.reason);
    signal?.addEventListener("abort", abort, { once: true });
    if (signal?.aborted) abort();
    this.#refused.add(stop);
    try {
      await Promise.race([this.#send(), stopped]);
    } finally {
      this.#refused.delete(stop);
      signal?.removeEventListener("abort", abort);
    }
  }

  get #pending(): number {
    return this.#open.size + this.#held + this.#failed.length;
  }

  /** Send the open adds in time. While others are in flight they are merged. */
  #plan(): void {
    if (this.#held > 0 || this.#open.size === 0) return;
    if (this.#pending * 2 >= this.#maxItems) void this.#send();
    else this.#cancelTimer ??= this.shared.options.clock.after(this.#maxDelayMs, () => void this.#send(), true);
  }

  /** Send the open adds after those in flight; resolves when the outcome of each is known. */
  #send(): Promise<void> {
    this.#cancelTimer?.();
    this.#cancelTimer = undefined;
    const totals = [...this.#open];
    this.#open.clear();
    this.#held += totals.length;
    if (totals.length > 0) this.#sending = this.#sending.then(() => this.#deliver(totals));
    return this.#sending;
  }

  async #deliver(totals: readonly (readonly [string, bigint])[]): Promise<void> {
    for (let at = 0; at < totals.length; at += BATCH_ITEMS_MAX) {
      const piece = totals.slice(at, at + BATCH_ITEMS_MAX);
      const items = piece.flatMap(([counter, total]) => parts(total).map((delta): Item => [counter, delta]));
      const course = new Course(this.shared, this.#ended.signal, Infinity);
      const refused = (failure: Failure): void => this.#refused.forEach((each) => each(causeOf(failure)));
      const outcomes = await new Delivery(items, this.calls, this.shared, course, refused).outcomes();
      items.forEach(([counter, delta], nth) => {
        const error = outcomes[nth];
        if (error instanceof CounterError) this.#failed.push(stringifiable({ counter, delta, error }));
      });
      this.#held -= piece.length;
    }
    this.#plan();
  }
}
