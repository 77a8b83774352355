/** The client: each add counts once if it is reported done, and at most once in any case. */

import {
  type Added,
  type AddedCount,
  type Busiest,
  type Cancelled,
  cancelledOf,
  type Change,
  type Cleared,
  type Count,
  type CounterEvent,
  type HoldCount,
  type HoldState,
  type Point,
  type Read,
  READERS,
  type Resolved,
  type Sum,
} from "./answers.js";
import { type Bounds, checkedDelta, checkedItem, checkedItems, type Delta, type Moment } from "./arguments.js";
import { AddBuffer, type BufferOptions } from "./buffer.js";
import { BATCH_ITEMS_MAX, Calls } from "./calls.js";
import { Delivery, type Outcome } from "./delivery.js";
import {
  invalid,
  RefusedError,
  shown,
  UnavailableError,
  UnknownOutcomeError,
  UnsentError,
} from "./errors.js";
import * as holds from "./holds.js";
import { Hold } from "./holds.js";
import * as live from "./live.js";
import * as namespaces from "./namespaces.js";
import { type Options, optionsOf } from "./options.js";
import * as reads from "./reads.js";
import type { CallOptions, EventsOptions, HistoryOptions, ListOptions, ReadOptions } from "./reads.js";
import { attempts, Budget, type Call, Course, resultOf, type Shared } from "./retrying.js";
import { type Credential, parseHold, Token } from "./tokens.js";
import { Transport } from "./transport.js";
import { type Item, type Operation, Unfinished } from "./unfinished.js";

const ATOMIC_ITEMS_MAX = 100;

export interface AddOptions extends CallOptions {
  /** The program's own token or key; without it the client makes a token for the call. */
  readonly token?: Credential | undefined;
}

/** The options of one add, with its bounds. */
export interface BoundedAddOptions extends AddOptions, Bounds {}

/** The options of a hold. */
export interface HoldOptions extends BoundedAddOptions {
  /** How long it lasts, such as `15m`. */
  readonly expiresIn: string;
}

/**
 * What to cancel: the arguments of the add, its bounds included, of a clear with 0 for each delta, or of a hold with its
 * amount.
 */
export interface ToCancel {
  /** `add` if it is not given. */
  readonly operation?: Operation;
  readonly items: Iterable<Delta>;
  readonly token: Credential;
  /** Of a hold. */
  readonly expiresIn?: string;
}

/** An add, a clear, a hold or its end that was not finished: its error, or what that has, or the text of it from any client. */
export type Open = UnknownOutcomeError | UnsentError | Unfinished | string;

export interface Settings extends Partial<Options> {
  /**
   * The base URL of the service, or several of its processes: after an attempt without an answer, or with a status of
   * 500 or more, the client goes on with the next one.
   */
  readonly url: string | readonly string[];
  readonly namespace?: string;
  readonly apiKey?: string;
}

/**
 * A client for one namespace. Its calls reject with RefusedError (a definite refusal),
 * UnknownOutcomeError (at most once; it has the token) or UnsentError (nothing was sent); reads with
 * RefusedError or UnavailableError.
 */
export class CounterClient {
  readonly namespace: string;
  readonly #calls: Calls;
  readonly #shared: Shared;

  /** Throws RefusedError for a setting out of its bounds. */
  constructor({ url, namespace = "default", apiKey, ...given }: Settings) {
    this.#calls = new Calls(namespace);
    this.namespace = namespace;
    const options = optionsOf(given);
    this.#shared = {
      options,
      transport: new Transport(url, apiKey, options),
      budget: new Budget(options.retriesAtOnce, options.retriesPerS, options.retriesPerCall, options.clock.now()),
      freshTokens: (count, timeoutMs, signal) => this.#freshTokens(count, timeoutMs, signal),
    };
  }

  /**
   * Add `delta` to `counter`, once for the token. Rejects with BoundReachedError, now and for every retry, if a bound
   * of the add or of the namespace is reached.
   */
  async add(counter: string, delta: number | bigint, options: BoundedAddOptions = {}): Promise<Added> {
    return this.#write("add", [checkedItem(counter, delta, options)], options, READERS.add);
  }

  /** Add, and return the count including the add. */
  async addAndGet(counter: string, delta: number | bigint, options: BoundedAddOptions = {}): Promise<AddedCount> {
    return this.#write("add-and-get", [checkedItem(counter, delta, options)], options, READERS["add-and-get"]);
  }

  /** Set `counter` to 0; adds with a later time count from there. */
  async clear(counter: string, options: AddOptions = {}): Promise<Cleared> {
    return this.#write("clear", [[counter, 0n]], options, READERS.clear);
  }

  /** Clear `counter`, and take its name off the list until a later add. Tokens keep their answers. */
  async delete(counter: string, options: AddOptions = {}): Promise<Cleared> {
    return this.#write("delete", [[counter, 0n]], options, READERS.delete);
  }

  /** Add to 1 to 100 counters under one token: all are counted, or none, also if a bound of one of them is reached. */
  async atomic(items: Iterable<Delta>, options: AddOptions = {}): Promise<Added[]> {
    return this.#write("atomic/add", checkedItems(items, ATOMIC_ITEMS_MAX), options, READERS["atomic/add"]);
  }

  /** Add to 1 to 1,000 counters, a token each; return an outcome for each, in order. Rejects only for invalid items. */
  async batch(items: Iterable<Delta>, { signal }: CallOptions = {}): Promise<readonly Outcome[]> {
    const checked = checkedItems(items, BATCH_ITEMS_MAX);
    return new Delivery(checked, this.#calls, this.#shared, new Course(this.#shared, signal)).outcomes();
  }

  /** Return a buffer that merges the adds of a counter and sends the totals in the background. */
  buffer(options: BufferOptions = {}): AddBuffer {
    return new AddBuffer(this.#calls, this.#shared, options);
  }

  /**
   * Reserve `amount` of `counter` for `expiresIn`: bounded adds and other holds leave room for it until it is settled,
   * released, or expires. Rejects with BoundReachedError if there is no room, with HoldEndedError if the token's hold has
   * ended, and as `add`. Release it at the end of the work, whatever becomes of that: see `withHold`, or use
   * `await using`.
   */
  async hold(counter: string, amount: number | bigint, options: HoldOptions): Promise<Hold> {
    const { token, signal } = options;
    const given = { expiresIn: holds.checkedDuration(options.expiresIn) };
    const items = [checkedItem(counter, amount, options)];
    return new Hold(this, await this.#call(this.#calls.write("hold", items, token, READERS.hold, given), signal));
  }

  /** Hold, call `use`, and release the hold unless `use` has settled it. Resolves with what `use` returns. */
  async withHold<T>(
    counter: string,
    amount: number | bigint,
    options: HoldOptions,
    use: (hold: Hold) => Promise<T>,
  ): Promise<T> {
    return holds.using(await this.hold(counter, amount, options), use);
  }

  /** Count `amount`, 0 or with the sign of the hold, and end the hold. Rejects with HoldEndedError, and as `add`. */
  async settleHold(hold: string, amount: number | bigint, { signal }: CallOptions = {}): Promise<HoldCount> {
    const { token, counter } = parseHold(hold);
    const item: Item = [counter, checkedDelta(amount, "amount")];
    return this.#call(this.#calls.end("settle", item, token, READERS.settle), signal);
  }

  /** Give back all that the hold reserves. Rejects as `settleHold`. */
  async releaseHold(hold: string, { signal }: CallOptions = {}): Promise<HoldCount> {
    const { token, counter } = parseHold(hold);
    return this.#call(this.#calls.end("release", [counter, 0n], token, READERS.release), signal);
  }

  /** Let the hold expire `expiresIn` from now, or when no hold may live longer; never earlier. */
  async extendHold(hold: string, expiresIn: string, { signal }: CallOptions = {}): Promise<HoldState> {
    return this.#call(holds.state(this.#calls, hold, holds.checkedDuration(expiresIn)), signal);
  }

  /** Return the hold, open or with its end. */
  async getHold(hold: string, { signal }: CallOptions = {}): Promise<HoldState> {
    return this.#call(holds.state(this.#calls, hold), signal);
  }

  /** Yield the open holds of `counter`, those that expire first. */
  holds(
    counter: string,
    options: CallOptions & { readonly limit?: number | undefined } = {},
  ): AsyncGenerator<HoldState, void> {
    return reads.paged(holds.open(this.#calls, counter), this.#shared, options);
  }

  /** Learn whether an unfinished add is counted, or a hold is open, settled or released, by sending it again. */
  async resolve(what: Open, { signal }: CallOptions = {}): Promise<Resolved> {
    const unfinished = unfinishedOf(what);
    try {
      await this.#again<unknown>(unfinished, READERS[unfinished.operation], signal);
      return { applied: true, detail: "" };
    } catch (error) {
      if (error instanceof RefusedError && error.code === "token_too_old" && error.applied === false) {
        return { applied: false, detail: error.message };
      }
      throw error;
    }
  }

  /**
   * Cancel an add, a clear or a hold: it counts nothing from now on, whether it was counted, is in flight or never arrives.
   *
   * A retry returns the same. Rejects with RefusedError of code `token_conflict` if the token was used with another
   * payload, and with UnknownOutcomeError if it is not known whether the token is cancelled: cancel it again.
   */
  async cancel(what: Open | ToCancel, { signal }: CallOptions = {}): Promise<Cancelled> {
    if (typeof what === "string" || what instanceof Unfinished || what instanceof UnavailableError) {
      return this.#again(unfinishedOf(what), cancelledOf, signal, true);
    }
    const { operation = "add", items, token, expiresIn } = what;
    const checked = checkedItems(items, operation === "atomic/add" ? ATOMIC_ITEMS_MAX : 1);
    const lasts = operation === "hold" ? holds.checkedDuration(expiresIn as string) : undefined;
    const unfinished = new Unfinished(operation, this.namespace, checked, String(token), undefined, lasts);
    return this.#again(unfinished, cancelledOf, signal, true);
  }

  /** Return 1 to 1,000 tokens with the service's time, for a machine whose clock is wrong. */
  async tokens(count = 1, { signal }: CallOptions = {}): Promise<Token[]> {
    return this.#call(reads.tokens(count), signal);
  }

  /** Return the count of `counter`; one that was never written reads 0. */
  async get(counter: string, { maxStaleness, signal }: ReadOptions = {}): Promise<Count> {
    return this.#call(reads.count(this.#calls, counter, maxStaleness), signal);
  }

  /** Return the counts of up to 1,000 counters, in order. */
  async getMany(counters: Iterable<string>, { maxStaleness, signal }: ReadOptions = {}): Promise<Count[]> {
    return this.#call(reads.counts(this.#calls, counters, maxStaleness), signal);
  }

  /** Yield the names of all counters, or of those with `prefix`, in code point order. */
  names({ prefix, signal }: CallOptions & { readonly prefix?: string | undefined } = {}): AsyncGenerator<string, void> {
    return reads.paged(reads.names(this.#calls, prefix), this.#shared, { signal });
  }

  /** Yield counters with their counts, in code point order or the largest first. */
  list(options: ListOptions = {}): AsyncGenerator<Count, void> {
    return reads.paged(reads.listed(this.#calls, options), this.#shared, options);
  }

  /** Return the sum of all counters with `prefix`, at most 10,000. */
  async sum(prefix?: string, { maxStaleness, signal }: ReadOptions = {}): Promise<Sum> {
    return this.#call(reads.sum(this.#calls, prefix, maxStaleness), signal);
  }

  /**
   * Return how much the count changed from `from` to `to` (now if undefined), exactly. Both are ends of windows of the
   * namespace, or "today" in the time zone `tz`.
   */
  async between(
    counter: string,
    from: Moment,
    to?: Moment,
    { tz, signal }: CallOptions & { readonly tz?: string | undefined } = {},
  ): Promise<Change> {
    return this.#call(reads.between(this.#calls, counter, from, to, tz), signal);
  }

  /** Return the count at the end of each step; of the last hour in about 60 steps by default. */
  async history(counter: string, options: HistoryOptions = {}): Promise<Point[]> {
    return this.#call(reads.history(this.#calls, counter, options), options.signal);
  }

  /** Yield the events of `counter`, the latest first. */
  events(counter: string, options: EventsOptions = {}): AsyncGenerator<CounterEvent, void> {
    return reads.paged(reads.events(this.#calls, counter, options), this.#shared, options);
  }

  /**
   * Yield the count, again whenever it changes, and every few seconds with a new `asOf`; a RefusedError in place of
   * one while the service cannot read it. Connects again if a connection ends. Ends when `signal` aborts; rejects with
   * a permanent failure, and with the last one if nothing came for `deadlineMs`.
   */
  live(counter: string, { signal }: CallOptions = {}): AsyncGenerator<Count | RefusedError, void> {
    return live.updates(reads.live(this.#calls, counter), this.#shared, signal);
  }

  /** Return the `limit` counters (1 to 100) with the most adds in the last `span`, at most `1m`. */
  async busiest(limit = 10, { span = "10s", signal }: CallOptions & { readonly span?: string } = {}): Promise<Busiest> {
    return this.#call(reads.busiest(this.#calls, limit, span), signal);
  }

  /** Make the next rollup recount the stored past of `counter` from its events; return the number of windows. */
  async recount(counter: string, { signal }: CallOptions = {}): Promise<number> {
    return this.#call(reads.recount(this.#calls, counter), signal);
  }

  /** Return the namespaces that the caller may see, with their settings. */
  async namespaces({ signal }: CallOptions = {}): Promise<namespaces.Namespace[]> {
    return this.#call(namespaces.all(), signal);
  }

  /** Return this client's namespace with its settings. */
  async settings({ signal }: CallOptions = {}): Promise<namespaces.Namespace> {
    return this.#call(namespaces.one(this.#calls), signal);
  }

  /** Create this client's namespace; `counter_type` is the least it needs. Rejects if it exists. */
  async createNamespace(
    settings: namespaces.NamespaceSettings,
    { signal }: CallOptions = {},
  ): Promise<namespaces.Namespace> {
    return this.#call(namespaces.create(this.#calls, settings), signal);
  }

  /** Change the given settings of this client's namespace. */
  async changeNamespace(
    settings: namespaces.NamespaceSettings,
    { signal }: CallOptions = {},
  ): Promise<namespaces.Namespace> {
    return this.#call(namespaces.change(this.#calls, settings), signal);
  }

  /** Delete this client's namespace permanently, with its counters, events and tokens. */
  async deleteNamespace({ signal }: CallOptions = {}): Promise<void> {
    return this.#call(namespaces.remove(this.#calls), signal);
  }

  #write<T>(operation: Operation, items: Item[], { token, signal }: AddOptions, read: Read<T>): Promise<T> {
    return this.#call(this.#calls.write(operation, items, token, read), signal);
  }

  /** Send an unfinished call again, or cancel it. */
  async #again<T>(unfinished: Unfinished, read: Read<T>, signal: AbortSignal | undefined, cancels = false): Promise<T> {
    const { operation, namespace, items, token, expiresIn } = unfinished;
    if (namespace !== this.namespace) {
      throw invalid(`it was sent to namespace ${shown(namespace)}, and this client is for ${this.namespace}`);
    }
    if (operation !== "settle" && operation !== "release") {
      const call = this.#calls.write(operation, items, token, read, { cancels, expiresIn });
      return this.#call({ ...call, unfinished }, signal);
    }
    if (cancels || !(token instanceof Token)) {
      throw invalid(`a ${operation} cannot be cancelled: correct what was settled with an add`);
    }
    return this.#call({ ...this.#calls.end(operation, items[0]!, token, read), unfinished }, signal);
  }

  #call<T>(call: Call<T>, signal: AbortSignal | undefined): Promise<T> {
    return attempts(call, this.#shared, signal);
  }

  async #freshTokens(count: number, timeoutMs: number, signal?: AbortSignal): Promise<Token[]> {
    const call = reads.tokens(count);
    const { transport } = this.#shared;
    const found = resultOf(call, await transport.send(call.request, timeoutMs, signal), transport);
    // A proxy may give the same answer to two clients: only the times are the service's.
    return Array.from({ length: count }, (_, at) => {
      const own = Token.new();
      return "result" in found ? new Token(own.nonce, found.result[at]!.generationTimeUs) : own;
    });
  }
}

function unfinishedOf(what: Open): Unfinished {
  if (what instanceof UnknownOutcomeError || what instanceof UnsentError) return what.unfinished;
  return what instanceof Unfinished ? what : Unfinished.parse(what);
}
