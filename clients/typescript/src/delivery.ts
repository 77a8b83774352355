/** A batch in delivery: each item is sent under its own token until it has an outcome. */

import { type Added, addedOf, type Asked, askedOf, eachOf } from "./answers.js";
import { BATCH_ITEMS_MAX, type Calls, itemText } from "./calls.js";
import { CounterError, type RefusedError } from "./errors.js";
import { causeOf, type Course, Fate, refusalOf, type Shared, waitOf } from "./retrying.js";
import { Token } from "./tokens.js";
import { type Answer, type Failure, isProblem, type Problem } from "./transport.js";
import { type Item, Unfinished } from "./unfinished.js";

/** Bytes of a body of 1 MiB that are left for its items. */
const ITEMS_BYTES_MAX = 1024 * 1024 - 64;
const UTF8 = new TextEncoder();

export type Outcome = Added | CounterError;

export class Delivery {
  readonly #outcomes: Outcome[] = [];
  #open: Pending[];
  #most = BATCH_ITEMS_MAX;
  /** Whether the last batch was refused as a whole, but not for ever. */
  #isRefused = false;

  /**
   * A refusal of a whole batch can end, such as that of a key that is revoked by mistake. With `refused` such a batch
   * is sent again after `refused` was called; otherwise it is the outcome of its items.
   */
  constructor(
    items: readonly Item[],
    private readonly calls: Calls,
    private readonly shared: Shared,
    private readonly course: Course,
    private readonly refused?: (failure: Failure) => void,
  ) {
    this.#open = items.map((item, at) => new Pending(at, item, calls.namespace, Token.new()));
  }

  /** Return the outcome of each item, in order, when all are known or the course is over. */
  async outcomes(): Promise<readonly Outcome[]> {
    const { course } = this;
    const { clock } = this.shared.options;
    for (;;) {
      // After the pause, which may be longer than the service accepts a token.
      await this.#renew();
      const endMs = clock.wallTime() + course.attemptMs;
      for (const each of this.#open) if (each.fate.isUnknown) this.#end(each, () => each.fate.checkHonoured(endMs));
      this.#forgetDone();
      if (this.#open.length === 0) return this.#outcomes;
      if (course.signal?.aborted) return this.#giveUp("the call was aborted", course.signal.reason);
      const { chunk, texts } = this.#chunk();
      const answer = await course.send(this.calls.batch(texts));
      for (const each of chunk) each.fate.told(answer.ttlMs, clock.wallTime());
      if (chunk.length > 1 && isTooMuch(answer)) {
        // The service has lower limits than the defaults.
        this.#most = chunk.length >> 1;
        continue;
      }
      const last = this.#settle(chunk, answer);
      this.#forgetDone();
      if (last === null) continue;
      const why = await course.pause(waitOf(last));
      if (why !== null) {
        if (this.#isRefused) for (const each of chunk) this.#judge(each, last);
        return this.#giveUp(why, causeOf(last));
      }
    }
  }

  /**
   * Renew the tokens of the next batch that are void, and those that are not counted and may not be honoured until its
   * end.
   */
  async #renew(): Promise<void> {
    const { course, shared } = this;
    const endMs = shared.options.clock.wallTime() + course.attemptMs;
    const next = this.#open.slice(0, this.#most);
    const spent = next.filter(({ refusal, fate }) => refusal !== undefined || (!fate.isUnknown && fate.isOver(endMs)));
    if (spent.length === 0 || course.signal?.aborted) return;
    const tokens = await shared.freshTokens(spent.length, course.attemptMs, course.signal);
    spent.forEach((each, at) => each.renew(tokens[at]!));
  }

  /** Return as many of the open items as fit into one body, and their texts. */
  #chunk(): { chunk: Pending[]; texts: string[] } {
    const texts: string[] = [];
    let free = ITEMS_BYTES_MAX;
    for (const { item, token } of this.#open.slice(0, this.#most)) {
      const text = itemText(item, token);
      free -= UTF8.encode(text).length + 1;
      if (free < 0 && texts.length > 0) break;
      texts.push(text);
    }
    return { chunk: this.#open.slice(0, texts.length), texts };
  }

  /**
   * End the items that `answer` decides; return the failure of the others after which the next attempt comes first, or
   * null if there are none.
   */
  #settle(chunk: Pending[], answer: Answer): Failure | null {
    let whole: Failure;
    this.#isRefused = false;
    if (answer.kind === "ok") {
      const results = resultsOf(answer.json, chunk);
      if (results !== null) {
        const failures = results.map((each) => this.#settleOne(each)).filter((each) => each !== null);
        return failures.length === 0 ? null : failures.reduce((one, other) => (waitOf(other) < waitOf(one) ? other : one));
      }
      whole = this.shared.transport.strange(200, answer.body);
    } else whole = answer;
    this.#isRefused = this.refused !== undefined && isPermanent(whole);
    if (this.#isRefused) this.refused?.(whole);
    if (!this.#isRefused) for (const item of chunk) this.#judge(item, whole);
    // Only a problem refuses: after another answer the items may be counted.
    else if (whole.kind !== "problem") for (const item of chunk) this.#judge(item, { ...whole, again: true });
    return chunk.every((each) => this.#isDone(each)) ? null : whole;
  }

  /** End an item if its result decides it; otherwise return the failure. */
  #settleOne({ item, result }: Result): Failure | null {
    if (!isProblem(result)) {
      this.#outcomes[item.at] = result;
      return null;
    }
    const answer = this.shared.transport.problem(result);
    this.#judge(item, answer);
    return this.#isDone(item) ? null : answer;
  }

  #judge(item: Pending, answer: Failure): void {
    this.#end(item, () => {
      const isVoid = item.fate.judge(answer, true) === "new_token" && answer.kind === "problem";
      item.refusal = isVoid ? refusalOf(answer.problem) : undefined;
    });
  }

  /** Do `step`; the CounterError that it throws is the outcome of `item`. */
  #end(item: Pending, step: () => void): void {
    try {
      step();
    } catch (error) {
      if (!(error instanceof CounterError)) throw error;
      this.#outcomes[item.at] = error;
    }
  }

  #giveUp(why: string, cause: unknown): readonly Outcome[] {
    for (const each of this.#open) {
      if (!this.#isDone(each)) this.#outcomes[each.at] = each.refusal ?? each.fate.givenUp(why, cause);
    }
    return this.#outcomes;
  }

  #isDone({ at }: Pending): boolean {
    return this.#outcomes[at] !== undefined;
  }

  #forgetDone(): void {
    this.#open = this.#open.filter((each) => !this.#isDone(each));
  }
}

type Result = { readonly item: Pending; readonly result: Added | Problem };

/** An item that has no outcome yet. */
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

function isPermanent(failure: Failure): boolean {
  return failure.kind === "problem" ? failure.problem.retry === "never" : !failure.again;
}

function isTooMuch(answer: Answer): boolean {
  if (answer.kind !== "problem") return false;
  const { code, field } = answer.problem;
  return code === "body_too_large" || (code === "invalid_body" && field === "items");
}

/** Return the results of a batch with their items, or null if they are not an answer to it. */
function resultsOf(json: unknown, chunk: readonly Pending[]): Result[] | null {
  try {
    return eachOf(json, chunk, (result, item) => {
      return { item, result: isProblem(result) ? result : addedOf(result, item.asked) };
    });
  } catch {
    return null;
  }
}
