// The rest is typed as Node 18 has it: what compiles needs no newer one, and browsers have it too.
declare var crypto: { getRandomValues(bytes: Uint8Array): Uint8Array };
interface RequestInit {
  cache?: "no-store";
}
