/** An add or a clear that was not finished, as text that every client of the service can resolve. */

import { invalid } from "./errors.js";
import { integer, parseJson, record, text, writeJson } from "./json.js";
import { type Credential, parseToken } from "./tokens.js";

export type Operation = "add" | "add-and-get" | "clear" | "atomic/add";
/** A counter and its delta; 0 for a clear. */
export type Item = readonly [counter: string, delta: bigint];

const OPERATIONS: readonly string[] = ["add", "add-and-get", "clear", "atomic/add"];

export class Unfinished {
  constructor(
    readonly operation: Operation,
    readonly namespace: string,
    readonly items: readonly Item[],
    readonly tokenText: string,
  ) {}

  get token(): Credential {
    return parseToken(this.tokenText);
  }

  toString(): string {
    const { operation, namespace, items } = this;
    return writeJson({ operation, namespace, items, token_text: this.tokenText });
  }

  /** Read the text of an Unfinished. Throws RefusedError. */
  static parse(written: string): Unfinished {
    try {
      const found = record(parseJson(written));
      const operation = text(found["operation"]);
      const items = (found["items"] as unknown[]).map((each): Item => {
        const [counter, delta] = each as unknown[];
        return [text(counter), integer(delta)];
      });
      if (!OPERATIONS.includes(operation)) throw new TypeError(operation);
      if (operation !== "atomic/add" && items.length !== 1) throw new TypeError("items");
      const read = new Unfinished(
        operation as Operation,
        text(found["namespace"]),
        items,
        text(found["token_text"]),
      );
      parseToken(read.tokenText);
      return read;
    } catch {
      throw invalid(`${JSON.stringify(written).slice(0, 80)} is not the text of an Unfinished`);
    }
  }
}
