/** One attempt over fetch: bounded in time and size, without redirects, and without the key in errors. */

import { invalid, type Retry } from "./errors.js";
import { parseJson } from "./json.js";
import type { Clock, Options } from "./options.js";

export interface Request {
  readonly method: "GET" | "POST" | "PUT" | "PATCH" | "DELETE";
  readonly path: string;
  readonly body?: string;
  readonly headers?: Readonly<Record<string, string>>;
  /** Adds, clears, batches and holds: the service may refuse to queue them for long. */
  readonly writes: boolean;
  /** The answer has many items. */
  readonly many: boolean;
}

export type Problem = Readonly<Record<string, unknown>> & { readonly code: string; readonly retry: Retry };

/** What came back: an answer, or none. */
export type Answer = {
  /** How long the service honours a token, if the answer says so. */
  readonly ttlMs?: number | undefined;
} & (
  | { readonly kind: "ok"; readonly body: string; readonly json: unknown }
  | { readonly kind: "problem"; readonly problem: Problem; readonly waitMs: number }
  /** Something other than a counter service answered. */
  | { readonly kind: "strange"; readonly detail: string; readonly again: boolean; readonly waitMs: number }
  | {
      readonly kind: "none";
      readonly detail: string;
      readonly sent: boolean;
      readonly again: boolean;
      readonly cause: unknown;
    }
);

/** An answer that is no success. */
export type Failure = Exclude<Answer, { kind: "ok" }>;

const ONE_BYTES_MAX = 64 * 1024;
const MANY_BYTES_MAX = 8 * 1024 * 1024;
const SHOWN_CHARS_MAX = 200;
/** Longer than any deadline. */
const WAIT_MAX_MS = 366 * 86_400_000;
const TTL_MAX_MS = 100 * 366 * 86_400_000;
const QUEUE_SHARE = 0.5;
const TRY_LATER = [408, 425, 429];
/** What fails before a byte is sent, as Node reports it; browsers report nothing. The code alone does not say so: that of
 * a host that is unreachable comes from an established connection too. */
const UNSENT_SYSCALLS = ["connect", "getaddrinfo"];
const UNSENT_CODE = "UND_ERR_CONNECT_TIMEOUT";
/** Ports that fetch never connects to: https://fetch.spec.whatwg.org/#bad-port */
const BAD_PORTS = new Set([
  ...[0, 1, 7, 9, 11, 13, 15, 17, 19, 20, 21, 22, 23, 25, 37, 42, 43, 53, 69, 77, 79, 87, 95, 101, 102, 103, 104, 109],
  ...[110, 111, 113, 115, 117, 119, 123, 135, 137, 139, 143, 161, 179, 389, 427, 465, 512, 513, 514, 515, 526, 530],
  ...[531, 532, 540, 548, 554, 556, 563, 587, 601, 636, 989, 990, 993, 995, 1719, 1720, 1723, 2049, 3659, 4045, 4190],
  ...[5060, 5061, 6000, 6566, 6665, 6666, 6667, 6668, 6669, 6679, 6697, 10080],
]);
/** The service sends something every 15 s: after so long without it, the connection of a stream is dead. */
const SILENCE_MS = 40_000;
const NO_CONTENT = 204;
const DISTRUSTED =
  /^(CERT_|ERR_TLS_CERT|DEPTH_ZERO_SELF_SIGNED_CERT|SELF_SIGNED_CERT|UNABLE_TO_(VERIFY|GET_ISSUER))/;

export class Transport {
  readonly #bases: readonly string[];
  #place = 0;
  readonly #key: string | undefined;
  readonly #options: Options;

  constructor(url: string | readonly string[], apiKey: string | undefined, options: Options) {
    this.#bases = [url].flat().map(baseOf);
    if (this.#bases.length === 0) throw invalid("there is no URL; give one like https://counter.example");
    if (apiKey !== undefined && !/^[!-~]+$/.test(apiKey)) {
      throw invalid("the API key is empty or has characters other than visible ASCII");
    }
    this.#key = apiKey;
    this.#options = options;
  }

  /** Send one attempt. Never throws; an aborted one has no answer. */
  async send(request: Request, timeoutMs: number, signal: AbortSignal | undefined): Promise<Answer> {
    const ending = new Ending(this.#options.clock, signal);
    const place = this.#place;
    const base = this.#bases[place]!;
    try {
      return await ending.within(timeoutMs, async () => {
        const response = await this.#fetch(base, request, timeoutMs, ending.signal);
        if (isFault(response.status)) this.#leave(place);
        return this.#answerOf(response, request);
      });
    } catch (error) {
      this.#leave(place);
      return this.#failure(base, error);
    } finally {
      // Close the connection of an answer that was not read to its end.
      ending.abort();
    }
  }

  /** Yield the lines of a stream. If it does not end regularly, the failure is the last. Never throws. */
  async *lines(request: Request, signal: AbortSignal | undefined): AsyncGenerator<string | Failure, void> {
    const { clock, attemptTimeoutMs } = this.#options;
    const ending = new Ending(clock, signal);
    const place = this.#place;
    const base = this.#bases[place]!;
    try {
      const opened = await ending.within(attemptTimeoutMs, async () => {
        const response = await this.#fetch(base, request, attemptTimeoutMs, ending.signal);
        if (isFault(response.status)) this.#leave(place);
        return response.ok ? response : this.#answerOf(response, request);
      });
      if ("kind" in opened) return yield opened as Failure;
      const reader = opened.body!.getReader();
      const decoder = new TextDecoder();
      for (let rest = ""; ; ) {
        const { done, value } = await ending.within(SILENCE_MS, () => reader.read());
        if (done) return;
        const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
        if (lines.some(({ length }) => length > ONE_BYTES_MAX)) {
          return yield this.strange(opened.status, `a line of more than ${ONE_BYTES_MAX} characters`);
        }
        rest = lines.pop()!;
        for (const line of lines) yield line.replace(/\r$/, "");
      }
    } catch (error) {
      this.#leave(place);
      yield this.#failure(base, error);
    } finally {
      ending.abort();
    }
  }

  /** Go on with the next URL, unless another call has done so. */
  #leave(place: number): void {
    if (this.#place === place) this.#place = (place + 1) % this.#bases.length;
  }

  #fetch(base: string, request: Request, timeoutMs: number, signal: AbortSignal): Promise<Response> {
    const headers: Record<string, string> = {
      ...{ accept: "application/json", "accept-encoding": "identity" },
      ...request.headers,
    };
    if (this.#key !== undefined) headers["authorization"] = `Bearer ${this.#key}`;
    if (request.body !== undefined) headers["content-type"] = "application/json";
    if (request.writes) {
      headers["request-timeout"] = `${Math.max(1, Math.floor(timeoutMs * QUEUE_SHARE))}ms`;
    }
    return this.#options.fetch(base + request.path, {
      method: request.method,
      headers,
      ...(request.body === undefined ? {} : { body: request.body }),
      redirect: "manual",
      credentials: "omit",
      cache: "no-store",
      referrerPolicy: "no-referrer",
      signal,
    });
  }

  async #answerOf(response: Response, request: Request): Promise<Answer> {
    const bytesMax = request.many && response.ok ? MANY_BYTES_MAX : ONE_BYTES_MAX;
    const body = await bodyOf(response, bytesMax);
    const waitMs = this.#waitMs(response.headers.get("retry-after"));
    const ttl = response.headers.get("idempotency-ttl") ?? "";
    // Anything else is a proxy's; what is longer means the same.
    const ttlMs = /^\d+$/.test(ttl) ? Math.min(Number(ttl) * 1000, TTL_MAX_MS) : undefined;
    const json = body === null ? undefined : parsed(body);
    if (!response.ok && isProblem(json)) return { ...this.problem(json, waitMs), ttlMs };
    if (response.ok && (json !== undefined || response.status === NO_CONTENT)) {
      return { kind: "ok", body: body ?? "", json, ttlMs };
    }
    return { ...this.strange(response.status, body ?? `more than ${bytesMax} bytes`, waitMs), ttlMs };
  }

  /** Return the problem as a failure; `waitMs` is what its headers ask to wait. */
  problem(problem: Problem, waitMs = 0): Failure {
    const asked = problem["retry_after"];
    return { kind: "problem", problem, waitMs: asked === undefined ? waitMs : this.#waitMs(asked) };
  }

  /** Return what an answer with `status` means that is not from a counter service. */
  strange(status: number, body: string, waitMs = 0): Failure {
    // A browser shows nothing of a redirect that it does not follow; its status is 0 then.
    const isRedirect = status === 0 || (status >= 300 && status < 400);
    const again = (status >= 200 && status < 300) || isFault(status) || TRY_LATER.includes(status);
    const shown = JSON.stringify(this.#withoutKey(body).slice(0, SHOWN_CHARS_MAX));
    const what = isRedirect ? "is a redirect, which is not followed" : `with ${shown} is not from a counter service`;
    return { kind: "strange", detail: `status ${status} ${what}; check the URL`, again, waitMs };
  }

  #failure(base: string, error: unknown): Failure {
    const causes = causesOf(error);
    const codes = causes.map((each) => String((each as { code?: unknown }).code ?? ""));
    const isDistrusted = codes.some((code) => DISTRUSTED.test(code));
    const isUnsent = codes.includes(UNSENT_CODE) ||
      causes.some((each) => UNSENT_SYSCALLS.includes(String((each as { syscall?: unknown }).syscall)));
    const last = causes.at(-1);
    const said = last instanceof Error ? last.message || codes.find((code) => code !== "") : String(last);
    const detail = this.#withoutKey(`${base} does not answer: ${said ?? "no reason is given"}`);
    return { kind: "none", detail, sent: !(isDistrusted || isUnsent), again: !isDistrusted, cause: error };
  }

  #withoutKey(text: string): string {
    return this.#key === undefined ? text : text.replaceAll(this.#key, "[API key]");
  }

  /** Return the milliseconds of a Retry-After: seconds, or the HTTP date of a proxy; otherwise 0. */
  #waitMs(value: unknown): number {
    let ms = 0;
    if (typeof value === "number" || typeof value === "bigint") ms = Number(value) * 1000;
    else if (typeof value === "string" && /^\d+$/.test(value)) ms = Number(value) * 1000;
    else if (typeof value === "string" && /^[A-Z][a-z]+,? /.test(value)) {
      ms = Date.parse(value) - this.#options.clock.wallTime();
    }
    return Number.isNaN(ms) ? 0 : Math.min(Math.max(0, ms), WAIT_MAX_MS);
  }
}

/** Aborts at a time limit, or with the signal of the program. */
export class Ending {
  readonly #abort = (): void => this.abort(this.outer?.reason);

  constructor(
    private readonly clock: Clock,
    private readonly outer: AbortSignal | undefined,
    private readonly controller = new AbortController(),
  ) {
    outer?.addEventListener("abort", this.#abort, { once: true });
    if (outer?.aborted) this.#abort();
  }

  get signal(): AbortSignal {
    return this.controller.signal;
  }

  /** Do `work`, and abort if it takes longer than `ms`. */
  async within<T>(ms: number, work: () => Promise<T>): Promise<T> {
    const cancel = this.clock.after(ms, () => {
      this.controller.abort(new DOMException(`no answer within ${Math.round(ms)} ms`, "TimeoutError"));
    });
    try {
      return await work();
    } finally {
      cancel();
    }
  }

  /** Abort, and listen to the program no more. */
  abort(reason?: unknown): void {
    this.outer?.removeEventListener("abort", this.#abort);
    this.controller.abort(reason);
  }
}

/** Read a body of at most `bytesMax` bytes; null if it has more. */
async function bodyOf(response: Response, bytesMax: number): Promise<string | null> {
  const reader = response.body?.getReader();
  if (reader === undefined) return "";
  const decoder = new TextDecoder();
  let text = "";
  for (let bytes = 0; ; ) {
    const { done, value } = await reader.read();
    if (done) return text + decoder.decode();
    bytes += value.length;
    // The caller closes the connection.
    if (bytes > bytesMax) return null;
    text += decoder.decode(value, { stream: true });
  }
}

/** Return the JSON of `body`; undefined if it is not JSON, or nested too deeply. */
export function parsed(body: string): unknown {
  try {
    return parseJson(body);
  } catch {
    return undefined;
  }
}

/** Whether it is a problem document: only a counter service names a code and how to retry. */
export function isProblem(json: unknown): json is Problem {
  if (typeof json !== "object" || json === null) return false;
  const { code, retry } = json as Record<string, unknown>;
  return typeof code === "string" && (retry === "same_token" || retry === "new_token" || retry === "never");
}

/** Whether `status` means that a server failed; 501 is what it does not support. */
function isFault(status: number): boolean {
  return status >= 500 && status !== 501;
}

/** Return `error` and its causes, also those of several addresses. */
function causesOf(error: unknown): object[] {
  const found: object[] = [];
  for (let each = error; typeof each === "object" && each !== null && found.length < 8; ) {
    found.push(each);
    const { cause, errors } = each as { cause?: unknown; errors?: unknown[] };
    each = cause ?? errors?.[0];
  }
  return found;
}

function baseOf(given: string): string {
  let url: URL;
  try {
    url = new URL(given);
  } catch {
    throw invalid("the URL is not valid; give one like https://counter.example");
  }
  if (!["http:", "https:"].includes(url.protocol) || url.username || url.password || url.search || url.hash) {
    throw invalid("the URL must be http or https, without user, query and fragment");
  }
  if (url.port !== "" && BAD_PORTS.has(Number(url.port))) {
    throw invalid(`fetch never connects to port ${url.port}, which belongs to another protocol; use another port`);
  }
  return url.origin + url.pathname.replace(/\/+$/, "");
}
