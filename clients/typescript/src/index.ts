/** Count exactly once, through retries: see README.md. */

export type { Added, AddedCount, Cleared, Count, Resolved } from "./answers.js";
export * from "./client.js";
export { CounterError, RefusedError, type Retry, UnavailableError, UnknownOutcomeError, UnsentError } from "./errors.js";
export type { Clock, Options } from "./options.js";
export { type Credential, Key, Token } from "./tokens.js";
export { type Operation, Unfinished } from "./unfinished.js";
