/** Each read of a namespace as data: the request and the parser of its answer. */

import {
  type Busiest,
  busiestOf,
  type Change,
  changeOf,
  type Count,
  type CounterEvent,
  countOf,
  eachOf,
  eventOf,
  type Page,
  pageOf,
  type Point,
  pointOf,
  type Sum,
  sumOf,
  tokensOf,
} from "./answers.js";
import { checkedInteger, checkedNames, type Moment, momentText } from "./arguments.js";
import { type Calls, get, post, query } from "./calls.js";
import { integer, list, record, text } from "./json.js";
import { attempts, type Call, refusalOf, type Shared } from "./retrying.js";
import type { Token } from "./tokens.js";
import { isProblem } from "./transport.js";

const PAGE_ITEMS_MAX = 1_000;

export interface CallOptions {
  /** Ends the call: a write with UnknownOutcomeError, or with UnsentError if nothing was sent. */
  readonly signal?: AbortSignal | undefined;
}

export interface ReadOptions extends CallOptions {
  /** The age of a count at most, such as `5s`; `0s` is accurate. Without it the namespace's setting holds. */
  readonly maxStaleness?: string | undefined;
}

export interface ListOptions extends ReadOptions {
  readonly prefix?: string | undefined;
  /** Needs a prefix that at most 10,000 counters have. */
  readonly largestFirst?: boolean | undefined;
  /** How many at most. */
  readonly limit?: number | undefined;
}

export interface SpanOptions extends CallOptions {
  /** Of the latest events or points by default; `to` is exclusive. */
  readonly from?: Moment | undefined;
  readonly to?: Moment | undefined;
}

export interface EventsOptions extends SpanOptions {
  /** How many at most. */
  readonly limit?: number | undefined;
}

export interface HistoryOptions extends SpanOptions {
  /** A duration such as `1m`, or `day`, `week` or `month` in the time zone `tz`. */
  readonly step?: string | undefined;
  /** Such as `Europe/Berlin`; UTC without it. */
  readonly tz?: string | undefined;
}

export function count(calls: Calls, counter: string, maxStaleness: string | undefined): Call<Count> {
  const request = get(calls.counter(counter) + query({ max_staleness: maxStaleness }));
  return { request, read: (json) => countOf(json, calls.namespace, counter) };
}

export function counts(calls: Calls, counters: Iterable<string>, maxStaleness: string | undefined): Call<Count[]> {
  const names = checkedNames(counters);
  const request = post(`${calls.base}/batch/get`, { counters: names, max_staleness: maxStaleness }, { many: true });
  const read = (result: unknown, counter: string): Count => {
    if (isProblem(result)) throw refusalOf(result);
    return countOf(result, calls.namespace, counter);
  };
  return { request, read: (json) => eachOf(json, names, read) };
}

export function between(
  calls: Calls,
  counter: string,
  from: Moment,
  to: Moment | undefined,
  tz: string | undefined,
): Call<Change> {
  const request = get(calls.counter(counter) + query({ ...span({ from, to }), tz }));
  return { request, read: (json) => changeOf(json, calls.namespace, counter) };
}

export function history(calls: Calls, counter: string, { from, to, step, tz }: HistoryOptions): Call<Point[]> {
  const request = get(`${calls.counter(counter)}/history${query({ ...span({ from, to }), step, tz })}`, { many: true });
  return { request, read: (json) => list(record(json)["points"]).map(pointOf) };
}

export function live(calls: Calls, counter: string): Call<Count> {
  const request = { ...get(`${calls.counter(counter)}/live`), headers: { accept: "text/event-stream" } };
  return { request, read: (json) => countOf(json, calls.namespace, counter) };
}

export function sum(calls: Calls, prefix: string | undefined, maxStaleness: string | undefined): Call<Sum> {
  const values = query({ prefix, sum: true, max_staleness: maxStaleness, limit: 1 });
  return { request: get(`${calls.base}/counters${values}`, { many: true }), read: sumOf };
}

export function busiest(calls: Calls, limit: number, span: string): Call<Busiest> {
  return { request: get(`${calls.base}/busiest${query({ limit, span })}`, { many: true }), read: busiestOf };
}

/** Make the service recount the counter's stored past; the result is the number of windows. */
export function recount(calls: Calls, counter: string): Call<number> {
  const request = post(`${calls.counter(counter)}/recount`, {});
  return { request, read: (json) => Number(integer(record(json)["windows"])) };
}

/** Tokens of the service, with its time. */
export function tokens(count: number): Call<Token[]> {
  const request = post("/v1/tokens", { count }, { many: true });
  return { request, read: (json) => tokensOf(json, count) };
}

/** Asks for one page of at most `limit` items. */
export type Ask<T> = (page: string | undefined, limit: number) => Call<Page<T>>;

export function names(calls: Calls, prefix: string | undefined): Ask<string> {
  return (page, limit) => ({
    request: get(`${calls.base}/counters${query({ prefix, limit, page })}`, { many: true }),
    read: (json) => pageOf(json, "counters", text),
  });
}

export function listed(calls: Calls, { prefix, largestFirst, maxStaleness }: ListOptions): Ask<Count> {
  const order = largestFirst ? "-count" : undefined;
  return (page, limit) => ({
    request: get(
      `${calls.base}/counters${query({ prefix, counts: true, order, max_staleness: maxStaleness, limit, page })}`,
      { many: true },
    ),
    read: (json) => pageOf(json, "counts", (each) => countOf(each, calls.namespace)),
  });
}

export function events(calls: Calls, counter: string, { from, to }: SpanOptions): Ask<CounterEvent> {
  const path = `${calls.counter(counter)}/events`;
  return (page, limit) => ({
    request: get(path + query({ ...span({ from, to }), limit, page }), { many: true }),
    read: (json) => pageOf(json, "events", eventOf),
  });
}

/** Yield at most `limit` items, read page by page. */
export async function* paged<T>(
  ask: Ask<T>,
  shared: Shared,
  { limit, signal }: CallOptions & { limit?: number | undefined },
): AsyncGenerator<T, void, undefined> {
  let left = limit === undefined ? Infinity : checkedInteger("limit", limit, 0);
  for (let page: string | undefined; left > 0; ) {
    const { found, next } = await attempts(ask(page, Math.min(PAGE_ITEMS_MAX, left)), shared, signal);
    yield* found;
    if (next === null) return;
    [page, left] = [next, left - found.length];
  }
}

function span({ from, to }: SpanOptions): { from: string | undefined; to: string | undefined } {
  const [begin, end] = [from, to].map((each) => (each === undefined ? undefined : momentText(each)));
  return { from: begin, to: end };
}
