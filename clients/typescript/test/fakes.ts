/** A clock that goes where waiting wants it, and a fetch that answers by a script. */

import { parseJson, writeJson } from "../src/json.js";
import { type Clock, CounterClient, type Settings } from "../src/node.js";

export interface Sent {
  readonly host: string;
  readonly path: string;
  readonly query: string;
  readonly body: string;
  readonly headers: Record<string, string>;
  readonly redirect: string;
  readonly signal: AbortSignal;
  readonly atMs: number;
}

/** An answer's status, body (or what makes it) and headers; an error; or no answer. The last one repeats. */
export type Scripted =
  | readonly [status: number, body: unknown, headers?: Record<string, string>]
  | Error
  | "silence"
  /** A stream that stays open after its text. */
  | { readonly open: string };

/** Answer an add, as if it was counted. */
export function added(sent: Sent): unknown {
  const { delta, idempotency_token } = parseJson(sent.body) as any;
  return answerTo(decodeURIComponent(sent.path.split("/").at(-2)!), delta, idempotency_token);
}

/** Return what answers items under one token, or under a token each: a problem, or "added". */
export function results(...each: unknown[]): (sent: Sent) => unknown {
  return (sent) => {
    const { items, idempotency_token } = parseJson(sent.body) as any;
    return {
      results: each.map((result, at) => {
        const { counter, delta, idempotency_token: own } = items[at];
        return result === "added" ? answerTo(counter, delta, own ?? idempotency_token) : result;
      }),
    };
  };
}

function answerTo(counter: string, delta: number, token: { generation_time: string }): unknown {
  return { namespace: "default", counter, delta, event_time: token.generation_time, replayed: false };
}

export const BUSY = { code: "overloaded", retry: "same_token", applied: null, detail: "busy" };
export const VOID = { code: "token_too_old", retry: "new_token", applied: false, detail: "void" };
export const CANCELLED = { code: "token_cancelled", retry: "never", applied: false, detail: "cancelled" };
export const GONE = { code: "namespace_unknown", retry: "never", applied: null, detail: "gone" };

export class FakeClock implements Clock {
  #nowMs = 0;
  /** When it began, in milliseconds since 1970. */
  beginMs = 1_769_847_330_000;
  /** Whether time does not pass. */
  hold = false;
  #waiting: { atMs: number; then: () => void }[] = [];

  now(): number {
    return this.#nowMs;
  }

  wallTime(): number {
    return this.beginMs + this.#nowMs;
  }

  after(ms: number, then: () => void): () => void {
    const wait = { atMs: this.#nowMs + ms, then };
    this.#waiting.push(wait);
    this.#idle();
    return () => {
      this.#waiting = this.#waiting.filter((each) => each !== wait);
    };
  }

  /** Let time pass again. */
  release(): void {
    this.hold = false;
    this.#idle();
  }

  /** Once nothing else runs, go to the next instant that is waited for. */
  #idle(): void {
    setImmediate(() => {
      const [next] = this.#waiting.sort((one, other) => one.atMs - other.atMs);
      if (next === undefined || this.hold) return;
      this.#nowMs = Math.max(this.#nowMs, next.atMs);
      this.#waiting = this.#waiting.filter((each) => each !== next);
      next.then();
    });
  }
}

export function script(answers: readonly Scripted[], clock: FakeClock): { fetch: typeof fetch; sent: Sent[] } {
  const sent: Sent[] = [];
  const scripted = async (url: unknown, request: RequestInit = {}): Promise<Response> => {
    const answer = answers[Math.min(sent.length, answers.length - 1)]!;
    const asked: Sent = {
      host: new URL(String(url)).host,
      path: new URL(String(url)).pathname,
      query: new URL(String(url)).search,
      body: String(request.body ?? "null"),
      headers: request.headers as Record<string, string>,
      redirect: String(request.redirect),
      signal: request.signal!,
      atMs: clock.now(),
    };
    sent.push(asked);
    if (answer === "silence") {
      return new Promise((_, reject) => {
        request.signal!.addEventListener("abort", () => reject(request.signal!.reason), { once: true });
      });
    }
    if (answer instanceof Error) throw answer;
    if ("open" in answer) return new Response(openStream(answer.open, request.signal!));
    const [status, given, headers] = answer;
    const body: unknown = typeof given === "function" ? given(asked) : given;
    return new Response(typeof body === "string" ? body : writeJson(body), { status, headers: headers ?? {} });
  };
  return { fetch: scripted as typeof fetch, sent };
}

function openStream(text: string, signal: AbortSignal): ReadableStream<Uint8Array> {
  return new ReadableStream({
    start(controller) {
      controller.enqueue(new TextEncoder().encode(text));
      signal.addEventListener("abort", () => controller.error(signal.reason), { once: true });
    },
  });
}

/** No call of these settings can retry. */
export const NO_RETRIES = { retriesAtOnce: 0, retriesPerS: 0, retriesPerCall: 0 };

/** A client of scripted answers, without randomness. */
export function made(answers: readonly Scripted[], more: Partial<Settings> = {}) {
  const clock = new FakeClock();
  const { fetch, sent } = script(answers, clock);
  const client = new CounterClient({ url: "http://counter.test/", fetch, clock, random: () => 1, ...more });
  return { client, sent, clock };
}
