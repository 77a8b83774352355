/** A clock that goes where waiting wants it, and a fetch that answers by a script. */

import type { Clock } from "../src/node.js";

export interface Sent {
  readonly host: string;
  readonly path: string;
  readonly body: string;
  readonly headers: Record<string, string>;
  readonly redirect: string;
  readonly atMs: number;
}

/** An answer's status, body and headers; an error; or no answer. The last one repeats. */
export type Scripted = readonly [status: number, body: unknown, headers?: Record<string, string>] | Error | "silence";

export class FakeClock implements Clock {
  #nowMs = 0;
  /** Whether time does not pass. */
  hold = false;
  #waiting: { atMs: number; then: () => void }[] = [];

  now(): number {
    return this.#nowMs;
  }

  wallTime(): number {
    return 1_769_847_330_000 + this.#nowMs;
  }

  after(ms: number, then: () => void): () => void {
    const wait = { atMs: this.#nowMs + ms, then };
    this.#waiting.push(wait);
    this.#idle();
    return () => {
      this.#waiting = this.#waiting.filter((each) => each !== wait);
    };
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
    sent.push({
      host: new URL(String(url)).host,
      path: new URL(String(url)).pathname,
      body: String(request.body ?? "null"),
      headers: request.headers as Record<string, string>,
      redirect: String(request.redirect),
      atMs: clock.now(),
    });
    if (answer === "silence") {
      return new Promise((_, reject) => {
        request.signal!.addEventListener("abort", () => reject(request.signal!.reason), { once: true });
      });
    }
    if (answer instanceof Error) throw answer;
    const [status, body, headers] = answer;
    return new Response(typeof body === "string" ? body : JSON.stringify(body), { status, headers: headers ?? {} });
  };
  return { fetch: scripted as typeof fetch, sent };
}
