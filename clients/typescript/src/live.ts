/** A counter's stream of counts, by server-sent events over fetch, which can send a key. */

import type { Count } from "./answers.js";
import type { RefusedError } from "./errors.js";
import { type Call, causeOf, Fate, pauseMs, refusalOf, resultOf, type Shared, sleep, waitOf } from "./retrying.js";
import { type Failure, isProblem, parsed } from "./transport.js";

const EVENT_CHARS_MAX = 64 * 1024;

/**
 * Yield each count, and each temporary failure of the service in place of one; connect again if a connection ends.
 * Return when `signal` aborts. Throw a permanent failure, and the last one if neither an update nor a comment came for
 * `deadlineMs`.
 */
export async function* updates(
  call: Call<Count>,
  shared: Shared,
  signal: AbortSignal | undefined,
): AsyncGenerator<Count | RefusedError, void, undefined> {
  const { options, transport } = shared;
  const { clock, deadlineMs } = options;
  let heardMs = clock.now();
  let failures = 0;
  while (!signal?.aborted) {
    const events = new Events();
    let failure: Failure | undefined;
    let isEmpty = true;
    for await (const line of transport.lines(call.request, signal)) {
      if (typeof line !== "string") {
        failure = line;
        break;
      }
      const event = events.line(line);
      // A comment is a sign of life.
      if (event === null && !line.startsWith(":")) continue;
      const update = event === null ? null : updateOf(event, call, shared);
      if (update !== null && "failure" in update) {
        failure = update.failure;
        break;
      }
      [heardMs, failures, isEmpty] = [clock.now(), 0, false];
      if (update !== null) yield update.value;
    }
    if (signal?.aborted) return;
    // Otherwise a page of something else would be read again and again without a pause.
    if (failure === undefined && isEmpty) failure = transport.strange(200, "a stream without a count");
    if (failure === undefined) {
      await sleep(pauseMs(options, 0, 0), clock, signal);
      continue;
    }
    const fate = new Fate(undefined);
    fate.judge(failure, false);
    // The wait that the service asks for counts as silence.
    const silentMs = clock.now() - heardMs + waitOf(failure);
    if (silentMs >= deadlineMs) throw fate.givenUp(`nothing came for ${deadlineMs} ms`, causeOf(failure));
    failures += 1;
    await sleep(pauseMs(options, failures, waitOf(failure)), clock, signal);
  }
}

interface ServerEvent {
  readonly name: "count" | "problem" | "too long";
  readonly data: string;
}

/** Puts lines together to events: https://html.spec.whatwg.org/multipage/server-sent-events.html */
class Events {
  #name = "";
  #data = "";

  /** Return the event that `line` ends, or makes too long; null if it ends none, or one of another name. */
  line(line: string): ServerEvent | null {
    const [, field, value] = /^([^:]*):? ?(.*)$/s.exec(line)!;
    if (field === "event") this.#name = value!;
    else if (field === "data") {
      this.#data += value!;
      if (this.#data.length > EVENT_CHARS_MAX) return { name: "too long", data: this.#data };
    } else if (line === "") {
      const [name, data] = [this.#name, this.#data];
      this.#name = this.#data = "";
      if (name === "count" || name === "problem") return { name, data };
    }
    return null;
  }
}

type Update = { readonly value: Count | RefusedError } | { readonly failure: Failure };

function updateOf({ name, data }: ServerEvent, call: Call<Count>, { transport }: Shared): Update {
  const json = name === "too long" ? undefined : parsed(data);
  if (name === "count") {
    const found = resultOf(call, { kind: "ok", body: data, json }, transport);
    return "result" in found ? { value: found.result } : { failure: found };
  }
  if (!isProblem(json)) return { failure: transport.strange(200, data) };
  return json.retry === "never" ? { failure: transport.problem(json) } : { value: refusalOf(json) };
}
