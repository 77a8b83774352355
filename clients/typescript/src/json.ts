/** JSON with exact integers: `JSON.parse` rounds those over 2^53, and counts have up to 64 bits and more. */

const TOKENS = /("[^"\\]*(?:\\.[^"\\]*)*")(\s*:)?|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?/g;
/** No count is longer, and BigInt takes more than linear time. */
const LARGE = /^-?\d{16,1000}$/;

/** Parse `text`; integers of 16 digits or more become bigints. Throws SyntaxError. */
export function parseJson(text: string): unknown {
  // It must be valid before the expression above may cut it into tokens.
  const rounded: unknown = JSON.parse(text);
  if (!/\d{16}/.test(text)) return rounded;
  // Each text that is a value begins with a mark that says whether it was a number.
  const marked = text.replace(TOKENS, (token: string, string?: string, colon?: string) => {
    if (string !== undefined) return colon === undefined ? `"s${string.slice(1)}` : token;
    return LARGE.test(token) ? `"n${token}"` : token;
  });
  return JSON.parse(marked, (_, value: unknown) => {
    if (typeof value !== "string") return value;
    return value.startsWith("n") ? BigInt(value.slice(1)) : value.slice(1);
  });
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

/** Write `value`, in which integers may be bigints. */
export function writeJson(value: unknown): string {
  if (typeof value === "bigint") return value.toString();
  if (Array.isArray(value)) return `[${value.map(writeJson).join(",")}]`;
  if (typeof value === "object" && value !== null) {
    const members = Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}:${writeJson(each)}`);
    return `{${members.join(",")}}`;
  }
  return JSON.stringify(value);
}
