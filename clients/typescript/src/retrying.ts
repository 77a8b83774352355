/** When a call is sent again, and what its end means. */

import {
  BoundReachedError,
  type CounterError,
  HoldExpiredError,
  HoldReleasedError,
  HoldSettledError,
  RefusedError,
  type Retry,
  TokenCancelledError,
  UnavailableError,
  UnknownOutcomeError,
  UnsentError,
} from "./errors.js";
import type { Clock, Options } from "./options.js";
import type { Token } from "./tokens.js";
import { type Answer, type Failure, isProblem, type Problem, type Request, type Transport } from "./transport.js";
import type { Unfinished } from "./unfinished.js";

/** fetch does not report whether an attempt that was cut off had a connection: shorter ones would end as unknown. */
const ATTEMPT_MS_MIN = 50;
/** The refusals that have a class of their own. */
const REFUSALS = new Map<string, typeof RefusedError>([
  ["bound_reached", BoundReachedError],
  ["hold_expired", HoldExpiredError],
  ["hold_released", HoldReleasedError],
  ["hold_settled", HoldSettledError],
  ["token_cancelled", TokenCancelledError],
]);
/** What the operations of holds are if they succeeded; anything else is counted. */
const DONE: Readonly<Record<string, string>> = { hold: "open", settle: "done", release: "done" };
/** Longest pause of a course without a deadline, whatever Retry-After says. */
const PAUSE_MS_MAX = 3_600_000;

/** A token bucket of retries, filled by time and calls, that all calls of a client share. */
export class Budget {
  #left: number;
  #thenMs: number;

  constructor(
    readonly atOnce: number,
    readonly perS: number,
    readonly perCall: number,
    nowMs: number,
  ) {
    this.#left = atOnce;
    this.#thenMs = nowMs;
  }

  /** Add a call's share. */
  call(): void {
    this.#left = Math.min(this.atOnce, this.#left + this.perCall);
  }

  /** Take one retry; return the milliseconds to wait for it, or null if that exceeds `waitMaxMs`. */
  take(nowMs: number, waitMaxMs: number): number | null {
    const regained = (Math.max(0, nowMs - this.#thenMs) / 1000) * this.perS;
    this.#left = Math.min(this.atOnce, this.#left + regained);
    this.#thenMs = nowMs;
    if (this.#left < 1 && this.perS === 0) return null;
    const waitMs = this.#left >= 1 ? 0 : ((1 - this.#left) / this.perS) * 1000;
    if (waitMs > waitMaxMs) return null;
    this.#left -= 1;
    return waitMs;
  }
}

/** Return the milliseconds to wait after `attempts` attempts, at least what the service asks. */
export function pauseMs(options: Options, attempts: number, askedMs: number): number {
  const most = Math.min(options.backoffMaxMs, options.backoffFirstMs * 2 ** Math.min(attempts, 32));
  return askedMs + options.random() * most;
}

/**
 * A request and the parser of its answer, which throws for any other answer; RefusedError for a problem that is a part
 * of it.
 */
export interface Call<T> {
  readonly request: Request;
  readonly read: (json: unknown) => T;
  /** None for a read. */
  readonly unfinished?: Unfinished;
  /** Whether it is the cancel of that. */
  readonly cancels?: boolean;
  /** The call with another token, if the program did not choose the token. */
  readonly renewed?: (token: Token) => Call<T>;
}

/** What the calls of a client share. */
export interface Shared {
  readonly options: Options;
  readonly transport: Transport;
  readonly budget: Budget;
  /** Return new tokens with the service's time; with this machine's time if there is no answer. */
  readonly freshTokens: (count: number, timeoutMs: number, signal?: AbortSignal) => Promise<Token[]>;
}

/** The deadline of a call and its pauses. Without a deadline (Infinity) it leaves the retry budget alone. */
export class Course {
  readonly #endMs: number;
  #failures = 0;

  constructor(
    private readonly shared: Shared,
    readonly signal: AbortSignal | undefined,
    readonly deadlineMs = shared.options.deadlineMs,
  ) {
    this.#endMs = shared.options.clock.now() + deadlineMs;
    if (deadlineMs !== Infinity) shared.budget.call();
  }

  get attemptMs(): number {
    const { options } = this.shared;
    return Math.min(options.attemptTimeoutMs, Math.max(1, this.#endMs - options.clock.now()));
  }

  send(request: Request): Promise<Answer> {
    return this.shared.transport.send(request, this.attemptMs, this.signal);
  }

  /** Wait before the attempt after one that failed; return why there is none, or null. */
  async pause(askedMs: number): Promise<string | null> {
    const { options, budget } = this.shared;
    this.#failures += 1;
    const made = `no definite answer in ${this.#failures} attempt${this.#failures === 1 ? "" : "s"}`;
    if (this.signal?.aborted) return `${made}, and the call was aborted`;
    let wait = pauseMs(options, this.#failures, askedMs);
    if (this.deadlineMs === Infinity) wait = Math.min(wait, PAUSE_MS_MAX);
    else {
      const left = this.#endMs - options.clock.now() - wait - ATTEMPT_MS_MIN;
      if (left <= 0) return `${made}, and the next would be past the deadline of ${this.deadlineMs} ms`;
      const forBudget = budget.take(options.clock.now(), left);
      if (forBudget === null) return `${made}, and the retries that all calls share are used up`;
      wait = Math.max(wait, forBudget);
    }
    await sleep(wait, options.clock, this.signal);
    return this.signal?.aborted ? `${made}, and the call was aborted` : null;
  }
}

/** Wait for `ms`, or until `signal` aborts. */
export function sleep(ms: number, clock: Clock, signal: AbortSignal | undefined): Promise<void> {
  return new Promise((wake) => {
    const done = (): void => {
      signal?.removeEventListener("abort", done);
      cancel();
      wake();
    };
    const cancel = clock.after(ms, done);
    signal?.addEventListener("abort", done, { once: true });
  });
}

/** Repeat `call` until there is a definite answer or its deadline passes. */
export async function attempts<T>(first: Call<T>, shared: Shared, signal?: AbortSignal): Promise<T> {
  const course = new Course(shared, signal);
  const fate = new Fate(first.unfinished, first.cancels);
  const { clock } = shared.options;
  const firstMs = clock.wallTime();
  // What the program resolves was sent by another call.
  let sent = true;
  for (let call = first; ; sent = fate.sent) {
    if (signal?.aborted) throw fate.givenUp("the call was aborted", signal.reason);
    fate.checkHonoured(clock.wallTime() + course.attemptMs, sent);
    const answer = resultOf(call, await course.send(call.request), shared.transport);
    if ("result" in answer) return answer.result;
    fate.told(answer.ttlMs, firstMs);
    const isVoid = fate.judge(answer, call.renewed !== undefined) === "new_token";
    const why = await course.pause(waitOf(answer));
    if (why !== null) throw isVoid ? causeOf(answer) : fate.givenUp(why, causeOf(answer));
    if (isVoid && call.renewed !== undefined) {
      // After the pause, which may be longer than the service accepts a token.
      const [token] = await shared.freshTokens(1, course.attemptMs, signal);
      call = call.renewed(token!);
      fate.unfinished = call.unfinished;
    }
  }
}

/** Return what `call` reads from `answer`; what it cannot read is not from a counter service. */
export function resultOf<T>(call: Call<T>, answer: Answer, transport: Transport): { result: T } | Failure {
  if (answer.kind !== "ok") return answer;
  try {
    return { result: call.read(answer.json) };
  } catch (error) {
    if (error instanceof RefusedError && isProblem(error.problem)) return transport.problem(error.problem);
    return transport.strange(200, answer.body);
  }
}

/** What is known of one add after its attempts so far. */
export class Fate {
  /** Whether an attempt may have arrived, and whether one may have counted. */
  #sent = false;
  #unknown = false;

  constructor(
    public unfinished: Unfinished | undefined,
    private readonly cancels = false,
  ) {}

  /** Whether an attempt may have arrived. */
  get sent(): boolean {
    return this.#sent;
  }

  /** Whether an attempt with the token may have counted. */
  get isUnknown(): boolean {
    return this.#unknown;
  }

  /** Whether the token may not be honoured until `endMs`. */
  isOver(endMs: number): boolean {
    return this.unfinished?.untilMs !== undefined && this.unfinished.untilMs < endMs;
  }

  /** Note how long the service honours the token, by an answer. */
  told(ttlMs: number | undefined, firstMs: number): void {
    if (ttlMs !== undefined) this.unfinished = this.unfinished?.told(ttlMs, firstMs);
  }

  /** Throw the end of the call if an attempt that may last until `endMs` could come too late. */
  checkHonoured(endMs: number, sent = this.#sent): void {
    if (this.unfinished === undefined || !this.isOver(endMs)) return;
    const { operation, tokenText, untilMs } = this.unfinished;
    const message =
      `it is not known whether the token's ${operation} is counted, and it is too late to send it again: the service` +
      ` surely honours ${tokenText} until ${new Date(untilMs!).toISOString()}; then a key counts again, and a token` +
      " gets no answer; compare the count with your own records";
    throw sent ? new UnknownOutcomeError(message, this.unfinished) : new UnsentError(message, this.unfinished);
  }

  /** Return how to go on after `answer`, which is no success. Throws the end of the call. */
  judge(answer: Failure, isOwnToken: boolean): Retry {
    const arrived = answer.kind !== "none" || answer.sent;
    this.#sent ||= arrived;
    if (answer.kind === "problem") {
      const refusal = refusalOf(answer.problem);
      const isTooOld = refusal.code === "token_too_old" && !this.#unknown;
      if ((refusal.retry === "new_token" || isTooOld) && isOwnToken) {
        // The old token is not counted, and never will be; and the program did not choose it.
        this.#unknown = false;
        return "new_token";
      }
      if (refusal.retry !== "same_token") {
        if (this.#unknown && this.unfinished !== undefined && !isFinal(refusal)) {
          throw this.givenUp("the retry was refused, which says nothing about the attempt before", refusal);
        }
        throw refusal;
      }
    } else if (!answer.again) {
      throw this.givenUp("a retry cannot help", causeOf(answer));
    }
    this.#unknown ||= arrived;
    return "same_token";
  }

  /** Return what to throw instead of a retry. */
  givenUp(why: string, cause: unknown): CounterError {
    const last = cause instanceof Error ? `: ${cause.message}` : "";
    if (this.unfinished === undefined) return new UnavailableError(`${why}${last}`, this.#sent, cause);
    const what = `the token's ${this.unfinished.operation}`;
    if (!this.#sent) {
      const unsent = `${this.cancels ? "the cancel of " : ""}${what} was not sent`;
      return new UnsentError(`${why}, and ${unsent}${last}`, this.unfinished, cause);
    }
    const usual = DONE[this.unfinished.operation] ?? "counted";
    const [done, then] = this.cancels ? ["cancelled", "cancel it again"] : [usual, "send it again, or resolve it"];
    const message = `${why}, and it is not known whether ${what} is ${done}${last}; ${then}`;
    return new UnknownOutcomeError(message, this.unfinished, cause);
  }
}

/** Return what the service asks to wait before the next attempt. */
export function waitOf(answer: Answer): number {
  return "waitMs" in answer ? answer.waitMs : 0;
}

/** Return the error that explains `answer`. */
export function causeOf(answer: Answer): unknown {
  if (answer.kind === "problem") return refusalOf(answer.problem);
  if (answer.kind === "ok") return undefined;
  return new UnavailableError(answer.detail, answer.kind === "strange" || answer.sent);
}

/** Return the problem as an error. */
export function refusalOf(problem: Problem): RefusedError {
  const { code, applied, retry, detail, title } = problem;
  const Refused = REFUSALS.get(code) ?? RefusedError;
  return new Refused(
    String(detail ?? title ?? `the service reports ${code}`),
    code,
    typeof applied === "boolean" ? applied : null,
    retry,
    problem,
  );
}

/** Whether the refusal holds for all attempts with the token. */
function isFinal({ code, applied }: RefusedError): boolean {
  return applied === false || code === "token_conflict" || code === "hold_settled";
}
