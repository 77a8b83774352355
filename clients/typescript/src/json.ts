/**
 * JSON with exact integers: `JSON.parse` rounds those over 2^53, and counts have up to 64 bits and more. The time is
 * linear and the depth bounded, because anything may answer in place of the service.
 */

const DEPTH_MAX = 100;
const NUMBER = /-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?/y;
/** No count is longer, and BigInt takes more than linear time. */
const LARGE = /^-?\d{16,1000}$/;
const LITERALS: readonly (readonly [string, unknown])[] = [["true", true], ["false", false], ["null", null]];
const [QUOTE, COMMA, COLON, BACKSLASH] = [0x22, 0x2c, 0x3a, 0x5c];
const [LIST, LIST_END, RECORD, RECORD_END] = [0x5b, 0x5d, 0x7b, 0x7d];

/** Parse `text`; integers of 16 digits or more become bigints. Throws SyntaxError. */
export function parseJson(text: string): unknown {
  const reader = new Reader(text);
  const found = reader.value(0);
  if (!Number.isNaN(reader.next())) throw reader.fault();
  return found;
}

class Reader {
  #at = 0;

  constructor(readonly text: string) {}

  fault(): SyntaxError {
    return new SyntaxError(`it is no JSON from character ${this.#at} on, or nested more than ${DEPTH_MAX} deep`);
  }

  /** Return the next code unit that is no space; NaN at the end. */
  next(): number {
    for (; ; this.#at++) {
      const code = this.text.charCodeAt(this.#at);
      if (code !== 0x20 && code !== 0x0a && code !== 0x0d && code !== 0x09) return code;
    }
  }

  value(depth: number): unknown {
    const code = this.next();
    if (code === QUOTE) return this.#string();
    if (code === LIST || code === RECORD) {
      if (depth === DEPTH_MAX) throw this.fault();
      return code === LIST ? this.#list(depth + 1) : this.#record(depth + 1);
    }
    for (const [word, value] of LITERALS) {
      if (this.text.startsWith(word, this.#at)) {
        this.#at += word.length;
        return value;
      }
    }
    return this.#number();
  }

  #list(depth: number): unknown[] {
    const found: unknown[] = [];
    for (let more = this.#begins(LIST_END); more; more = this.#goesOn(LIST_END)) found.push(this.value(depth));
    return found;
  }

  #record(depth: number): Record<string, unknown> {
    const found: Record<string, unknown> = {};
    for (let more = this.#begins(RECORD_END); more; more = this.#goesOn(RECORD_END)) {
      if (this.next() !== QUOTE) throw this.fault();
      const name = this.#string();
      if (this.next() !== COLON) throw this.fault();
      this.#at++;
      const value = this.value(depth);
      // An assignment would set the prototype.
      if (name !== "__proto__") found[name] = value;
    }
    return found;
  }

  /** Go past the bracket; return whether the list or record has a part. */
  #begins(end: number): boolean {
    this.#at++;
    if (this.next() !== end) return true;
    this.#at++;
    return false;
  }

  /** Go past what follows a part; return whether that is another one. */
  #goesOn(end: number): boolean {
    const code = this.next();
    if (code !== COMMA && code !== end) throw this.fault();
    this.#at++;
    return code === COMMA;
  }

  #string(): string {
    const begin = this.#at;
    let isPlain = true;
    for (this.#at++; ; this.#at++) {
      const code = this.text.charCodeAt(this.#at);
      if (code === QUOTE) break;
      if (code === BACKSLASH) {
        isPlain = false;
        this.#at++;
      } else if (!(code >= 0x20)) throw this.fault();
    }
    this.#at++;
    const whole = this.text.slice(begin, this.#at);
    return isPlain ? whole.slice(1, -1) : (JSON.parse(whole) as string);
  }

  #number(): number | bigint {
    NUMBER.lastIndex = this.#at;
    if (!NUMBER.test(this.text)) throw this.fault();
    const found = this.text.slice(this.#at, NUMBER.lastIndex);
    this.#at = NUMBER.lastIndex;
    return found.length >= 16 && LARGE.test(found) ? BigInt(found) : Number(found);
  }
}

/** Return `value` as a bigint. Throws TypeError if it is not an exact integer. */
export function integer(value: unknown): bigint {
  if (typeof value === "bigint") return value;
  if (typeof value === "number" && Number.isSafeInteger(value)) return BigInt(value);
  throw new TypeError(`${String(value)} is not an integer`);
}

/** Return `value` as an object. Throws TypeError. */
export function record(value: unknown): Record<string, unknown> {
  if (typeof value === "object" && value !== null && !Array.isArray(value)) {
    return value as Record<string, unknown>;
  }
  throw new TypeError("it is not an object");
}

/** Return `value` as a list. Throws TypeError. */
export function list(value: unknown): unknown[] {
  if (Array.isArray(value)) return value;
  throw new TypeError("it is not a list");
}

/** Return `value` as text. Throws TypeError. */
export function text(value: unknown): string {
  if (typeof value === "string") return value;
  throw new TypeError("it is not text");
}

/** Write `value`, in which integers may be bigints; members that are undefined are left out. */
export function writeJson(value: unknown): string {
  if (typeof value === "bigint") return value.toString();
  if (Array.isArray(value)) return `[${value.map(writeJson).join(",")}]`;
  if (typeof value === "object" && value !== null) {
    const members = Object.entries(value).filter(([, each]) => each !== undefined);
    return `{${members.map(([name, each]) => `${JSON.stringify(name)}:${writeJson(each)}`).join(",")}}`;
  }
  return JSON.stringify(value);
}

/**
 * `result`, which `JSON.stringify` takes: it takes no bigint, so an integer becomes a number, or text if a number would
 * round it.
 */
export function stringifiable<T extends object>(result: T): T {
  const toJSON = (): unknown => plain({ ...result });
  return Object.defineProperty(result, "toJSON", { value: toJSON });
}

function plain(value: unknown): unknown {
  if (Array.isArray(value)) return value.map(plain);
  if (typeof value === "object" && value !== null && !("toJSON" in value)) {
    return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, plain(each)]));
  }
  if (typeof value !== "bigint") return value;
  return BigInt.asIntN(54, value) === value ? Number(value) : String(value);
}
