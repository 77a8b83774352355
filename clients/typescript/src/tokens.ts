/** Idempotency tokens and keys: one for each intended add, sent with every attempt. */

import { blake2b } from "./blake2b.js";
import { invalid, shown } from "./errors.js";

export const KEY_CHARS_MAX = 255;
const LABEL_CHARS_MAX = 256;
const NONCE_BYTES = 16;
const TIME_BYTES = 8;
/** The year 10000, whose times have no text. */
const TIME_END_US = 253_402_300_800_000_000n;
const NONCE = /^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$/i;
const TIME =
  /^(\d{4})-(\d\d)-(\d\d)[Tt ](\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?(?:[Zz]|([+-])(\d\d):(\d\d))$/;

/** A nonce of 16 bytes, as a lower-case UUID, and its time in microseconds since 1970, UTC. */
export class Token {
  constructor(
    readonly nonce: string,
    readonly generationTimeUs: bigint,
  ) {
    if (!NONCE.test(nonce)) throw invalid(`the nonce ${shown(nonce)} is not a UUID`);
    this.nonce = nonce.toLowerCase();
  }

  /** Return a unique token with this machine's time. */
  static new(): Token {
    return new Token(uuidOf(crypto.getRandomValues(new Uint8Array(NONCE_BYTES))), BigInt(Date.now()) * 1000n);
  }

  /** Return a key made of the program's own id, such as `order-123`. Throws RefusedError. */
  static fromKey(text: string): Key {
    return new Key(text);
  }

  /** Read the text of a token or a key. Throws RefusedError. */
  static parse(text: string): Credential {
    return parseToken(text);
  }

  /** Return the token of the step `label` (1 to 256 characters) of this token's work: the same everywhere. */
  derive(label: string): Token {
    const data = joined(bytesOf(this.nonce), labelBytes(label));
    return new Token(uuidOf(blake2b(data, NONCE_BYTES, "counter.derive")), this.generationTimeUs);
  }

  /** The time as the service writes it. */
  get generationTime(): string {
    return formatTime(this.generationTimeUs);
  }

  toString(): string {
    return `${this.nonce}@${this.generationTime}`;
  }
}

/** An idempotency key. The service reserves a time for it, and remembers it for the namespace's `key_ttl`. */
export class Key {
  constructor(readonly text: string) {
    if (text.length < 1 || text.length > KEY_CHARS_MAX) {
      throw invalid(`the key has ${text.length} characters; 1 to ${KEY_CHARS_MAX} are allowed`);
    }
    if (!/^[!-~](?:[ -~]*[!-~])?$/.test(text)) {
      throw invalid(`the key ${shown(text)} must be visible ASCII, with spaces only inside: hash other ids`);
    }
  }

  /** Return the key of the step `label` (1 to 256 characters): the same everywhere. */
  derive(label: string): Key {
    const text = new TextEncoder().encode(this.text);
    const length = new Uint8Array(4);
    new DataView(length.buffer).setUint32(0, text.length);
    const digest = blake2b(joined(length, text, labelBytes(label)), 24, "counter.keystep");
    return new Key(`derived:${hexOf(digest)}`);
  }

  toString(): string {
    return `key:${this.text}`;
  }
}

export type Credential = Token | Key;

/** Return the id of the hold of `counter` under `token`, as the service makes it. */
export function holdId({ nonce, generationTimeUs }: Token, counter: string): string {
  const time = new Uint8Array(TIME_BYTES);
  new DataView(time.buffer).setBigUint64(0, generationTimeUs);
  const data = joined(time, bytesOf(nonce), new TextEncoder().encode(counter));
  const text = btoa(Array.from(data, (each) => String.fromCharCode(each)).join(""));
  return text.replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
}

/** Return the token and the counter of the hold with the id `text`. Throws RefusedError. */
export function parseHold(text: string): { token: Token; counter: string } {
  try {
    const data = Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (each) => each.charCodeAt(0));
    const timeUs = new DataView(data.buffer).getBigUint64(0);
    const token = new Token(uuidOf(data.slice(TIME_BYTES, TIME_BYTES + NONCE_BYTES)), timeUs);
    const counter = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(data.slice(TIME_BYTES + NONCE_BYTES));
    if (timeUs < TIME_END_US && counter !== "" && holdId(token, counter) === text) return { token, counter };
  } catch {
    // The error below names the text.
  }
  throw invalid(`${shown(text)} is not the id of a hold; give the id that the hold has`);
}

export function parseToken(text: string): Credential {
  if (text.startsWith("key:")) return new Key(text.slice(4));
  const at = text.indexOf("@");
  const timeUs = parseTime(text.slice(at + 1));
  if (at < 0 || timeUs === null || !NONCE.test(text.slice(0, at))) {
    throw invalid(`${shown(text)} is not a token; it is written <UUID>@<RFC 3339 time> or key:<key>`);
  }
  return new Token(text.slice(0, at), timeUs);
}

/** Return the microseconds of an RFC 3339 time with an offset, or null if it is none. */
export function parseTime(text: string): bigint | null {
  const found = TIME.exec(text);
  if (found === null) return null;
  const [, year, month, day, hour, minute, second, fraction, sign, hours, minutes] = found;
  const plain = `${year}-${month}-${day}T${hour}:${minute}:${second}.000Z`;
  const time = new Date(plain);
  // Date moves an impossible day to the next month.
  if (Number.isNaN(time.getTime()) || time.toISOString() !== plain) return null;
  if (Number(hours ?? 0) > 23 || Number(minutes ?? 0) > 59) return null;
  const offset = (Number(hours ?? 0) * 60 + Number(minutes ?? 0)) * 60_000 * (sign === "-" ? -1 : 1);
  return BigInt(time.getTime() - offset) * 1000n + BigInt((fraction ?? "").padEnd(6, "0"));
}

export function formatTime(us: bigint): string {
  const part = ((us % 1_000_000n) + 1_000_000n) % 1_000_000n;
  const seconds = new Date(Number((us - part) / 1000n)).toISOString().slice(0, 19);
  return `${seconds}.${part.toString().padStart(6, "0")}Z`;
}

function labelBytes(label: string): Uint8Array {
  const count = [...label].length;
  if (count < 1 || count > LABEL_CHARS_MAX) {
    throw invalid(`label has ${count} characters; 1 to ${LABEL_CHARS_MAX} are allowed`);
  }
  if (/\p{Cs}/u.test(label)) throw invalid("label is not valid text: it has a lone surrogate");
  return new TextEncoder().encode(label);
}

function bytesOf(nonce: string): Uint8Array {
  return Uint8Array.from(nonce.replaceAll("-", "").match(/../g)!, (pair) => parseInt(pair, 16));
}

function uuidOf(bytes: Uint8Array): string {
  return hexOf(bytes).replace(/^(.{8})(.{4})(.{4})(.{4})/, "$1-$2-$3-$4-");
}

function hexOf(bytes: Uint8Array): string {
  return Array.from(bytes, (each) => each.toString(16).padStart(2, "0")).join("");
}

function joined(...parts: Uint8Array[]): Uint8Array {
  const whole = new Uint8Array(parts.reduce((sum, each) => sum + each.length, 0));
  let at = 0;
  for (const each of parts) {
    whole.set(each, at);
    at += each.length;
  }
  return whole;
}
