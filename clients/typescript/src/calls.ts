/** Each write of a namespace as data: the request and the parser of its answer. */

import { askedOf, type Read } from "./answers.js";
import { checkedName, checkedNamespace, escaped } from "./arguments.js";
import { invalid, shown } from "./errors.js";
import { writeJson } from "./json.js";
import type { Call } from "./retrying.js";
import { type Credential, holdId, Key, Token } from "./tokens.js";
import type { Request } from "./transport.js";
import { type Item, type Operation, Unfinished } from "./unfinished.js";

export const BATCH_ITEMS_MAX = 1_000;

/** The paths and the writes of one namespace. */
export class Calls {
  readonly base: string;

  constructor(readonly namespace: string) {
    this.base = `/v1/namespaces/${checkedNamespace(namespace)}`;
  }

  /** Return the path of `counter`. */
  counter(counter: string): string {
    checkedName(counter);
    if (counter === "." || counter === "..") {
      // WHATWG URLs drop these parts of a path, also when they are escaped.
      throw invalid(
        `fetch cannot send the counter ${shown(counter)} in a path; use atomic, batch or getMany for it`,
      );
    }
    return `${this.base}/counters/${escaped(counter)}`;
  }

  /** An add, a clear or a hold under `token`, or under a new one made once for the call; or the cancel of one. */
  write<T>(
    operation: Operation,
    items: readonly Item[],
    token: Credential | undefined,
    read: Read<T>,
    { cancels = false, expiresIn }: { cancels?: boolean; expiresIn?: string | undefined } = {},
  ): Call<T> {
    if (token === undefined) {
      const renewed = (fresh: Token): Call<T> => {
        return { ...this.write(operation, items, fresh, read, { expiresIn }), renewed };
      };
      return renewed(Token.new());
    }
    if (!(token instanceof Token || token instanceof Key)) {
      throw invalid("the token is neither a Token nor a Key; make one with Token.fromKey or Token.parse");
    }
    const [[counter, delta, bounds]] = items as [Item];
    const isAtomic = operation === "atomic/add";
    const isDelete = operation === "delete" && !cancels;
    const isClear = operation === "delete" || operation === "clear";
    const isHold = operation === "hold";
    const verb = cancels ? "cancel" : isAtomic ? "add" : isHold ? "holds" : operation;
    const path = `${isAtomic ? `${this.base}/atomic` : this.counter(counter)}${isDelete ? "" : `/${verb}`}`;
    const body = {
      ...(isAtomic ? { items: items.map(([name, each, own]) => ({ counter: checkedName(name), delta: each, ...own })) } : {}),
      ...(isAtomic || isClear ? {} : { [isHold ? "amount" : "delta"]: delta, ...bounds }),
      ...(isHold ? { expires_in: expiresIn } : {}),
      ...((isClear || isHold) && cancels ? { operation } : {}),
      ...(token instanceof Token ? { idempotency_token: wireToken(token) } : {}),
    };
    const headers: Record<string, string> = token instanceof Key ? { "idempotency-key": token.text } : {};
    const request: Request = { ...post(path, body, { writes: true, many: isAtomic && !cancels }), headers };
    return {
      request: isDelete ? { ...request, method: "DELETE" } : request,
      read: (json) => read(json, items.map((item) => askedOf(this.namespace, item, token))),
      unfinished: new Unfinished(operation, this.namespace, items, String(token), undefined, expiresIn),
      cancels,
    };
  }

  /** The settle or the release of the hold of a counter under `token`. */
  end<T>(operation: "settle" | "release", [counter, amount]: Item, token: Token, read: Read<T>): Call<T> {
    const item: Item = [checkedName(counter), amount];
    const body = operation === "settle" ? { amount } : {};
    return {
      request: post(`${this.base}/holds/${holdId(token, counter)}/${operation}`, body, { writes: true }),
      read: (json) => read(json, [askedOf(this.namespace, item, token)]),
      unfinished: new Unfinished(operation, this.namespace, [item], String(token)),
    };
  }

  /** A batch of `texts`, which are from `itemText`. */
  batch(texts: readonly string[]): Request {
    const request = post(`${this.base}/batch/add`, {}, { writes: true, many: true });
    return { ...request, body: `{"items":[${texts.join(",")}]}` };
  }
}

/** Return one item of a batch as JSON. */
export function itemText([counter, delta, bounds]: Item, token: Token): string {
  return writeJson({ counter, delta, ...bounds, idempotency_token: wireToken(token) });
}

/** Return the query of the `values` that are given. */
export function query(values: Record<string, string | number | boolean | undefined>): string {
  const given = Object.entries(values).filter(([, value]) => value !== undefined);
  const text = given.map(([name, value]) => `${name}=${escaped(String(value))}`).join("&");
  return text === "" ? "" : `?${text}`;
}

export function get(path: string, { many = false } = {}): Request {
  return { method: "GET", path, writes: false, many };
}

export function post(path: string, body: object, { writes = false, many = false } = {}): Request {
  return { method: "POST", path, body: writeJson(body), writes, many };
}

function wireToken(token: Token): object {
  return { token: token.nonce, generation_time: token.generationTime };
}
