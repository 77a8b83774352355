/** BLAKE2b (RFC 7693) with a personalization, for short inputs: Web Crypto does not have it. */

const MASK = (1n << 64n) - 1n;
const IV = [
  0x6a09e667f3bcc908n, 0xbb67ae8584caa73bn, 0x3c6ef372fe94f82bn, 0xa54ff53a5f1d36f1n,
  0x510e527fade682d1n, 0x9b05688c2b3e6c1fn, 0x1f83d9abfb41bd6bn, 0x5be0cd19137e2179n,
];
const SIGMA = [
  "0123456789abcdef", "ea489fd61c02b753", "b8c052fdae367194", "7931dcbe265a40f8",
  "905724afe1bc683d", "2c6a0b834d75fe19", "c51fed4a0763928b", "db7ec13950f4862a",
  "6fe9b308c2d714a5", "a2847615fb9e3cd0", "0123456789abcdef", "ea489fd61c02b753",
].map((row) => [...row].map((digit) => parseInt(digit, 16)));
const MIXED = [
  [0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15],
  [0, 5, 10, 15], [1, 6, 11, 12], [2, 7, 8, 13], [3, 4, 9, 14],
] as const;
const BLOCK_BYTES = 128;

/** Return the digest of `data` in `size` bytes (1 to 64); `person` has at most 16 ASCII characters. */
export function blake2b(data: Uint8Array, size: number, person: string): Uint8Array {
  const parameters = new Uint8Array(64);
  parameters.set([size, 0, 1, 1]);
  parameters.set(new TextEncoder().encode(person), 48);
  const state = words(parameters).map((word, at) => word ^ IV[at]!);
  const blocks = Math.max(1, Math.ceil(data.length / BLOCK_BYTES));
  const padded = new Uint8Array(blocks * BLOCK_BYTES);
  padded.set(data);
  for (let at = 0; at < blocks; at++) {
    const end = Math.min(data.length, (at + 1) * BLOCK_BYTES);
    const block = padded.subarray(at * BLOCK_BYTES, (at + 1) * BLOCK_BYTES);
    compress(state, words(block), BigInt(end), at === blocks - 1);
  }
  const digest = new DataView(new ArrayBuffer(64));
  state.forEach((word, at) => digest.setBigUint64(at * 8, word, true));
  return new Uint8Array(digest.buffer, 0, size);
}

function words(bytes: Uint8Array): bigint[] {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
  return Array.from({ length: bytes.length / 8 }, (_, at) => view.getBigUint64(at * 8, true));
}

function compress(state: bigint[], block: bigint[], bytesSoFar: bigint, isLast: boolean): void {
  const v = [...state, ...IV];
  v[12]! ^= bytesSoFar;
  if (isLast) v[14]! ^= MASK;
  for (const order of SIGMA) {
    MIXED.forEach(([a, b, c, d], at) => {
      v[a] = (v[a]! + v[b]! + block[order[2 * at]!]!) & MASK;
      v[d] = rotated(v[d]! ^ v[a]!, 32n);
      v[c] = (v[c]! + v[d]!) & MASK;
      v[b] = rotated(v[b]! ^ v[c]!, 24n);
      v[a] = (v[a]! + v[b]! + block[order[2 * at + 1]!]!) & MASK;
      v[d] = rotated(v[d]! ^ v[a]!, 16n);
      v[c] = (v[c]! + v[d]!) & MASK;
      v[b] = rotated(v[b]! ^ v[c]!, 63n);
    });
  }
  for (let at = 0; at < 8; at++) state[at]! ^= v[at]! ^ v[at + 8]!;
}

function rotated(word: bigint, bits: bigint): bigint {
  return (word >> bits) | ((word << (64n - bits)) & MASK);
}
