/** The entry of Node: version 18 has the Web Crypto API only as a module. Bundlers for browsers take index.ts. */

import { webcrypto } from "node:crypto";

globalThis.crypto ??= webcrypto as typeof crypto;

export * from "./index.js";
