/** Count exactly once, through retries: see README.md. */

export type {
  Added,
  AddedCount,
  Busiest,
  Busy,
  Cancelled,
  Change,
  Cleared,
  Count,
  CounterEvent,
  HoldCount,
  HoldState,
  Point,
  RefusedAdd,
  Resolved,
  Sum,
} from "./answers.js";
export type { Bounds, Delta, Moment } from "./arguments.js";
export type { AddBuffer, BufferOptions } from "./buffer.js";
export * from "./client.js";
export type { Outcome } from "./delivery.js";
export {
  BoundReachedError,
  BufferFullError,
  ClosedError,
  CounterError,
  HoldEndedError,
  HoldExpiredError,
  HoldReleasedError,
  HoldSettledError,
  type NotCounted,
  NotCountedError,
  RefusedError,
  type Retry,
  TokenCancelledError,
  UnavailableError,
  UnknownOutcomeError,
  UnsentError,
} from "./errors.js";
export { Hold } from "./holds.js";
export type { Namespace, NamespaceSettings } from "./namespaces.js";
export type { Clock, Options } from "./options.js";
export type { CallOptions, EventsOptions, HistoryOptions, ListOptions, ReadOptions, SpanOptions } from "./reads.js";
export { type Credential, Key, Token } from "./tokens.js";
export { type Operation, Unfinished } from "./unfinished.js";
