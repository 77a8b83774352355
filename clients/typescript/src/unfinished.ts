/** An add, a clear, a hold or its end that was not finished, as text that every client of the service can resolve. */

import { type Bounds, checkedItem } from "./arguments.js";
import { invalid } from "./errors.js";
import { integer, parseJson, record, text, writeJson } from "./json.js";
import { type Credential, formatTime, parseTime, parseToken, Token } from "./tokens.js";

export type Operation = "add" | "add-and-get" | "clear" | "delete" | "atomic/add" | "hold" | "settle" | "release";
/** The bounds of an add, by the names of the HTTP API. */
export interface WireBounds {
  readonly at_least?: bigint;
  readonly at_most?: bigint;
}
/** A counter and its delta, 0 for a clear or a release, the amount of a hold or a settle; and the bounds of the add if it has any. */
export type Item = readonly [counter: string, delta: bigint, bounds?: WireBounds];

const OPERATIONS: readonly string[] = ["add", "add-and-get", "clear", "delete", "atomic/add", "hold", "settle", "release"];

export class Unfinished {
  constructor(
    readonly operation: Operation,
    readonly namespace: string,
    readonly items: readonly Item[],
    readonly tokenText: string,
    /**
     * Until when the service surely honours it, in milliseconds since 1970; undefined if no answer said
     * so. Later a token's outcome is unknown for ever, and a key is a new one.
     */
    readonly untilMs?: number | undefined,
    /** Of a hold, such as `15m`. */
    readonly expiresIn?: string | undefined,
  ) {}

  get token(): Credential {
    return parseToken(this.tokenText);
  }

  toString(): string {
    const { operation, namespace, items } = this;
    const until = this.untilMs === undefined ? {} : { until: formatTime(BigInt(Math.floor(this.untilMs)) * 1000n) };
    const lasts = this.expiresIn === undefined ? {} : { expires_in: this.expiresIn };
    return writeJson({ operation, namespace, items, token_text: this.tokenText, ...until, ...lasts });
  }

  /** Return the text, for JSON.stringify. */
  toJSON(): string {
    return String(this);
  }

  /** Return it with the end of `ttlMs` from the token's own time, or from a key's first attempt, if that is earlier. */
  told(ttlMs: number, firstMs: number): Unfinished {
    const { operation, namespace, items, tokenText, token } = this;
    const fromMs = token instanceof Token ? Number(token.generationTimeUs / 1000n) : firstMs;
    const untilMs = Math.min(fromMs + ttlMs, this.untilMs ?? Infinity);
    return new Unfinished(operation, namespace, items, tokenText, untilMs, this.expiresIn);
  }

  /** Read the text of an Unfinished. Throws RefusedError. */
  static parse(written: string): Unfinished {
    try {
      const found = record(parseJson(written));
      const operation = text(found["operation"]);
      const items = (found["items"] as unknown[]).map(itemOf);
      if (!OPERATIONS.includes(operation)) throw new TypeError(operation);
      if (items.length === 0 || (operation !== "atomic/add" && items.length !== 1)) throw new TypeError("items");
      const read = new Unfinished(
        operation as Operation,
        text(found["namespace"]),
        items,
        text(found["token_text"]),
        found["until"] === undefined ? undefined : msOf(text(found["until"])),
        found["expires_in"] === undefined ? undefined : text(found["expires_in"]),
      );
      if ((operation === "hold") !== Boolean(read.expiresIn)) throw new TypeError("expires_in");
      const isEnd = operation === "settle" || operation === "release";
      if (!(read.token instanceof Token) && isEnd) throw new TypeError("token_text");
      return read;
    } catch {
      throw invalid(`${JSON.stringify(written).slice(0, 80)} is not the text of an Unfinished`);
    }
  }
}

function itemOf(written: unknown): Item {
  const [counter, delta, bounds = {}, ...more] = written as unknown[];
  const { at_least: atLeast, at_most: atMost, ...others } = record(bounds);
  // One that this client does not know would not be sent.
  if (more.length > 0 || Object.keys(others).length > 0) throw new TypeError("items");
  return checkedItem(text(counter), integer(delta), { atLeast, atMost } as Bounds);
}

function msOf(moment: string): number {
  const us = parseTime(moment);
  if (us === null) throw new TypeError("until");
  return Number(us / 1000n);
}
