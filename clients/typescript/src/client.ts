/** The client: each add counts once if it is reported done, and at most once in any case. */

import {
  type Added,
  type AddedCount,
  addedOf,
  type Asked,
  askedOf,
  type Cleared,
  type Count,
  countOf,
  eachOf,
  type Read,
  READERS,
  type Resolved,
  timesOf,
} from "./answers.js";
import { CounterError, invalid, RefusedError, UnknownOutcomeError, UnsentError } from "./errors.js";
import { writeJson } from "./json.js";
import { type Options, optionsOf } from "./options.js";
import { attempts, Budget, type Call, causeOf, Course, Fate, refusalOf, type Shared, waitOf } from "./retrying.js";
import { type Credential, Key, Token } from "./tokens.js";
import { type Answer, type Failure, isProblem, type Problem, type Request, Transport } from "./transport.js";
import { type Item, type Operation, Unfinished } from "./unfinished.js";

const INT64_MAX = 2n ** 63n - 1n;
const NAME_CHARS_MAX = 256;
/** What no counter's name holds, as the service says; unlike \p{C} it is the same with every version of Node. */
const REFUSED = new RegExp(
  "[\\0-\\x1f\\x7f-\\xa0\\xad\\u061c\\u1680\\u180e\\u2000-\\u200b\\u200e\\u200f\\u2028-\\u202f\\u205f-\\u206f\\u3000" +
    "\\ud800-\\uf8ff\\ufeff\\ufff9-\\ufffb\\u{e0001}\\u{f0000}-\\u{10ffff}]",
  "u",
);
const ATOMIC_ITEMS_MAX = 100;
const BATCH_ITEMS_MAX = 1_000;

/** A counter and its delta: an integer of 64 bits. */
export type Delta = readonly [counter: string, delta: number | bigint];

export interface CallOptions {
  /** Ends the call with UnknownOutcomeError, or with UnsentError if nothing was sent. */
  readonly signal?: AbortSignal;
}

export interface AddOptions extends CallOptions {
  /** The program's own token or key; without it the client makes a token for the call. */
  readonly token?: Credential;
}

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
  readonly #base: string;
  readonly #shared: Shared;

  /** Throws RefusedError for a setting out of its bounds. */
  constructor({ url, namespace = "default", apiKey, ...given }: Settings) {
    if (!/^[a-z][a-z0-9_-]{0,62}$/.test(namespace)) {
      throw invalid(
        `the namespace is ${shown(namespace)}; its name begins with a lower-case letter, and has up to 63` +
          " lower-case letters, digits, - and _",
      );
    }
    this.namespace = namespace;
    this.#base = `/v1/namespaces/${namespace}`;
    const options = optionsOf(given);
    this.#shared = {
      options,
      transport: new Transport(url, apiKey, options),
      budget: new Budget(options.retriesAtOnce, options.retriesPerS, options.retriesPerCall, options.clock.now()),
      freshTokens: (count, timeoutMs, signal) => this.#freshTokens(count, timeoutMs, signal),
    };
  }

  /** Add `delta` to `counter`, once for the token. */
  async add(counter: string, delta: number | bigint, { token, signal }: AddOptions = {}): Promise<Added> {
    return attempts(this.#write("add", [[counter, checkedDelta(delta)]], token, READERS.add), this.#shared, signal);
  }

  /** Add, and return the count including the add. */
  async addAndGet(
    counter: string,
    delta: number | bigint,
    { token, signal }: AddOptions = {},
  ): Promise<AddedCount> {
    const items: Item[] = [[counter, checkedDelta(delta)]];
    return attempts(this.#write("add-and-get", items, token, READERS["add-and-get"]), this.#shared, signal);
  }

  /** Set `counter` to 0; adds with a later time count from there. */
  async clear(counter: string, { token, signal }: AddOptions = {}): Promise<Cleared> {
    return attempts(this.#write("clear", [[counter, 0n]], token, READERS.clear), this.#shared, signal);
  }

  /** Clear `counter`, and take its name off the list until a later add. Tokens keep their answers. */
  async delete(counter: string, { token, signal }: AddOptions = {}): Promise<Cleared> {
    return attempts(this.#write("delete", [[counter, 0n]], token, READERS.delete), this.#shared, signal);
  }

  /** Add to 1 to 100 counters under one token: all are counted, or none. */
  async atomic(items: Iterable<Delta>, { token, signal }: AddOptions = {}): Promise<Added[]> {
    const checked = checkedItems(items, ATOMIC_ITEMS_MAX);
    return attempts(this.#write("atomic/add", checked, token, READERS["atomic/add"]), this.#shared, signal);
  }

  /** Return the count of `counter`, at most as stale as `maxStaleness` (such as `0s`) or the namespace says. */
  async get(counter: string, { maxStaleness, signal }: CallOptions & { maxStaleness?: string } = {}): Promise<Count> {
    const query = maxStaleness === undefined ? "" : `?max_staleness=${encodeURIComponent(maxStaleness)}`;
    const request: Request = { method: "GET", path: this.#counter(counter) + query, writes: false, many: false };
    const read = (json: unknown): Count => countOf(json, this.namespace, counter);
    return attempts({ request, read }, this.#shared, signal);
  }

  /**
   * Learn whether an unfinished add is counted, by sending it again: from an error of this client, or
   * from the text of an Unfinished of any client.
   */
  async resolve(
    what: UnknownOutcomeError | UnsentError | Unfinished | string,
    { signal }: CallOptions = {},
  ): Promise<Resolved> {
    const unfinished = unfinishedOf(what);
    if (unfinished.namespace !== this.namespace) {
      throw invalid(`it was sent to namespace ${shown(unfinished.namespace)}, and this client is for ${this.namespace}`);
    }
    const { operation, items, token } = unfinished;
    try {
      const read: Read<unknown> = READERS[operation];
      await attempts({ ...this.#write(operation, items, token, read), unfinished }, this.#shared, signal);
      return { applied: true, detail: "" };
    } catch (error) {
      if (error instanceof RefusedError && error.code === "token_too_old" && error.applied === false) {
        return { applied: false, detail: error.message };
      }
      throw error;
    }
  }

  /** Add to 1 to 1,000 counters, a token each; return an outcome for each item, in order. Rejects only for invalid items. */
  async batch(items: Iterable<Delta>, { signal }: CallOptions = {}): Promise<(Added | CounterError)[]> {
    const found: (Added | CounterError)[] = [];
    let open = checkedItems(items, BATCH_ITEMS_MAX).map((item, at) => {
      return new Pending(at, item, this.namespace, Token.new());
    });
    const course = new Course(this.#shared, signal);
    const { clock } = this.#shared.options;
    for (;;) {
      const endMs = clock.wallTime() + course.attemptMs;
      open = open.filter((each) => ended(each, found, () => each.fate.checkHonoured(endMs)) === undefined);
      if (open.length === 0) return found;
      const answer = signal?.aborted ? null : await course.send(this.#batchOf(open));
      if (answer === null) {
        for (const each of open) found[each.at] = each.fate.givenUp("the call was aborted", signal?.reason);
        return found;
      }
      for (const each of open) each.fate.told(answer.ttlMs, clock.wallTime());
      const { left, askedMs, last } = this.#settle(open, answer, found);
      if (left.length === 0) return found;
      const why = await course.pause(askedMs);
      if (why !== null) {
        for (const each of left) found[each.at] = each.refusal ?? each.fate.givenUp(why, causeOf(last));
        return found;
      }
      const spent = left.filter((each) => each.refusal !== undefined);
      if (spent.length > 0) {
        // After the pause, which may be longer than the service accepts a token.
        const tokens = await this.#shared.freshTokens(spent.length, course.attemptMs, signal);
        spent.forEach((each, at) => each.renew(tokens[at]!));
      }
      open = left;
    }
  }

  /** Put the outcomes that `answer` decides into `found`; return the items to send again. */
  #settle(open: Pending[], answer: Answer, found: (Added | CounterError)[]): Settled {
    let whole: Failure;
    if (answer.kind === "ok") {
      const results = resultsOf(answer.json, open);
      if (results !== null) {
        const waits = results.map((each) => this.#settleOne(each, found)).filter((each) => each !== null);
        const left = results.filter(({ item }) => found[item.at] === undefined).map(({ item }) => item);
        const last = waits[0] ?? answer;
        return { left, askedMs: Math.max(0, ...waits.map(waitOf)), last };
      }
      whole = this.#shared.transport.strange(200, answer.body);
    } else whole = answer;
    for (const item of open) judge(item, whole, found);
    return { left: open.filter(({ at }) => found[at] === undefined), askedMs: waitOf(whole), last: whole };
  }

  #settleOne({ item, result }: Result, found: (Added | CounterError)[]): Answer | null {
    if (!isProblem(result)) {
      found[item.at] = result;
      return null;
    }
    const waitMs = this.#shared.transport.waitMs(result["retry_after"]);
    const answer: Failure = { kind: "problem", problem: result, waitMs };
    judge(item, answer, found);
    return answer;
  }

  #batchOf(open: readonly Pending[]): Request {
    const items = open.map(({ item: [counter, delta], token }) => {
      return { counter, delta, idempotency_token: wireToken(token) };
    });
    return post(`${this.#base}/batch/add`, { items }, { many: true });
  }

  /** An add or a clear under `token`, or under a new one made once for the call. */
  #write<T>(
    operation: Operation,
    items: readonly Item[],
    token: Credential | undefined,
    read: Read<T>,
  ): Call<T> {
    if (token === undefined) {
      const renewed = (fresh: Token): Call<T> => ({ ...this.#write(operation, items, fresh, read), renewed });
      return renewed(Token.new());
    }
    if (!(token instanceof Token || token instanceof Key)) {
      throw invalid("the token is neither a Token nor a Key; make one with Token.fromKey or Token.parse");
    }
    const [[counter, delta]] = items as [Item];
    const isAtomic = operation === "atomic/add";
    const isDelete = operation === "delete";
    const path = isAtomic
      ? `${this.#base}/atomic/add`
      : `${this.#counter(counter)}${isDelete ? "" : `/${operation}`}`;
    const body = {
      ...(isAtomic ? { items: items.map(([name, each]) => ({ counter: checkedName(name), delta: each })) } : {}),
      ...(isAtomic || isDelete || operation === "clear" ? {} : { delta }),
      ...(token instanceof Token ? { idempotency_token: wireToken(token) } : {}),
    };
    const request = post(path, body, { many: isAtomic, ...(token instanceof Key ? { key: token.text } : {}) });
    return {
      request: isDelete ? { ...request, method: "DELETE" } : request,
      read: (json) => read(json, items.map((item) => askedOf(this.namespace, item, token))),
      unfinished: new Unfinished(operation, this.namespace, items, String(token)),
    };
  }

  async #freshTokens(count: number, timeoutMs: number, signal?: AbortSignal): Promise<Token[]> {
    const request: Request = { ...post("/v1/tokens", { count }, { many: true }), writes: false };
    const answer = await this.#shared.transport.send(request, timeoutMs, signal);
    const times = answer.kind === "ok" ? timesOf(answer.json, count) : null;
    // A proxy may give the same answer to two clients: only the times are the service's.
    return Array.from({ length: count }, (_, at) => {
      const own = Token.new();
      return times === null ? own : new Token(own.nonce, times[at]!);
    });
  }

  #counter(counter: string): string {
    checkedName(counter);
    if (counter === "." || counter === "..") {
      // WHATWG URLs drop these parts of a path, also when they are escaped.
      throw invalid(`fetch cannot send the counter ${shown(counter)} in a path; use atomic or batch for it`);
    }
    const escaped = encodeURIComponent(counter).replace(/[!'()*]/g, (each) => {
      return `%${each.charCodeAt(0).toString(16).toUpperCase()}`;
    });
    return `${this.#base}/counters/${escaped}`;
  }
}

type Result = { readonly item: Pending; readonly result: Added | Problem };
type Settled = { readonly left: Pending[]; readonly askedMs: number; readonly last: Answer };

/** An item of a batch that has no outcome yet. */
class Pending {
  readonly fate: Fate;
  /** Why the token is void; none if it is not. */
  refusal: RefusedError | undefined;

  constructor(
    readonly at: number,
    readonly item: Item,
    readonly namespace: string,
    public token: Token,
  ) {
    this.fate = new Fate(new Unfinished("add", namespace, [item], String(token)));
  }

  get asked(): Asked {
    return askedOf(this.namespace, this.item, this.token);
  }

  renew(token: Token): void {
    this.refusal = undefined;
    this.token = token;
    this.fate.unfinished = new Unfinished("add", this.namespace, [this.item], String(token));
  }
}

/** Judge `item` by `answer`; an end goes into `found`. */
function judge(item: Pending, answer: Failure, found: (Added | CounterError)[]): void {
  ended(item, found, () => {
    const isVoid = item.fate.judge(answer, true) === "new_token" && answer.kind === "problem";
    item.refusal = isVoid ? refusalOf(answer.problem) : undefined;
  });
}

/** Do `step`; put the end of `item` that it throws into `found`, and return it. */
function ended(item: Pending, found: (Added | CounterError)[], step: () => void): CounterError | undefined {
  try {
    step();
    return undefined;
  } catch (error) {
    if (!(error instanceof CounterError)) throw error;
    found[item.at] = error;
    return error;
  }
}

/** Return the results of a batch with their items, or null if they are not an answer to it. */
function resultsOf(json: unknown, open: readonly Pending[]): Result[] | null {
  try {
    return eachOf(json, open, (result, item) => {
      return { item, result: isProblem(result) ? result : addedOf(result, item.asked) };
    });
  } catch {
    return null;
  }
}

function post(path: string, body: object, more: { many: boolean; key?: string }): Request {
  return { method: "POST", path, body: writeJson(body), writes: true, ...more };
}

function wireToken(token: Token): object {
  return { token: token.nonce, generation_time: token.generationTime };
}

function unfinishedOf(what: UnknownOutcomeError | UnsentError | Unfinished | string): Unfinished {
  if (what instanceof UnknownOutcomeError || what instanceof UnsentError) return what.unfinished;
  return what instanceof Unfinished ? what : Unfinished.parse(what);
}

function checkedDelta(delta: number | bigint): bigint {
  if (typeof delta === "bigint" ? delta >= -INT64_MAX - 1n && delta <= INT64_MAX : Number.isSafeInteger(delta)) {
    return BigInt(delta);
  }
  throw invalid(
    `the delta is ${shown(delta)}; it must be a bigint of 64 bits, or a number that is an exact integer (under 2**53)`,
  );
}

function checkedName(counter: string): string {
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

function checkedItems(items: Iterable<Delta>, most: number): Item[] {
  const found = Array.from(items, ([counter, delta]): Item => [checkedName(counter), checkedDelta(delta)]);
  if (found.length < 1 || found.length > most) {
    throw invalid(`there are ${found.length} items; 1 to ${most} are allowed`);
  }
  return found;
}

function shown(value: unknown): string {
  return (typeof value === "bigint" ? value.toString() : (JSON.stringify(value) ?? String(value))).slice(0, 80);
}
