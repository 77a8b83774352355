/** Calls that list, make and change namespaces. */

import { type Calls, get, post } from "./calls.js";
import { list, record, stringifiable, text } from "./json.js";
import type { Call } from "./retrying.js";

/** Settings by the names of the HTTP API; durations are text such as `5s`. */
export interface NamespaceSettings {
  readonly counter_type?: "ACCURATE" | "EVENTUAL" | "BEST_EFFORT";
  readonly [setting: string]: unknown;
}

/** A namespace as the service writes it, with all of its settings; `warnings` only if there are any. */
export interface Namespace {
  readonly namespace: string;
  readonly counter_type: string;
  readonly [setting: string]: unknown;
}

/** The namespaces that the caller may see. */
export function all(): Call<Namespace[]> {
  return {
    request: get("/v1/namespaces", { many: true }),
    read: (json) => list(record(json)["namespaces"]).map(namespaceOf),
  };
}

export function one({ base, namespace }: Calls): Call<Namespace> {
  return { request: get(base), read: (json) => ownOf(json, namespace) };
}

/** Create a namespace; an existing one is never changed. */
export function create(calls: Calls, settings: NamespaceSettings): Call<Namespace> {
  return put(calls, settings, { "if-none-match": "*" });
}

/** Change an existing namespace; none is created. */
export function change(calls: Calls, settings: NamespaceSettings): Call<Namespace> {
  return put(calls, settings, { "if-match": "*" });
}

export function remove({ base }: Calls): Call<void> {
  const read = (json: unknown): void => {
    if (json !== undefined) throw new TypeError("an answer without a body is expected");
  };
  return { request: { ...get(base), method: "DELETE" }, read };
}

type Headers = Record<string, string>;

function put({ base, namespace }: Calls, settings: NamespaceSettings, headers: Headers): Call<Namespace> {
  const request = { ...post(base, settings), method: "PUT" as const, headers };
  return { request, read: (json) => ownOf(json, namespace) };
}

function ownOf(json: unknown, namespace: string): Namespace {
  const found = namespaceOf(json);
  if (found.namespace !== namespace) throw new TypeError("it is about another namespace");
  return found;
}

function namespaceOf(json: unknown): Namespace {
  const found = record(json);
  return stringifiable({ ...found, namespace: text(found["namespace"]), counter_type: text(found["counter_type"]) });
}
