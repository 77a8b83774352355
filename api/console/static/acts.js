// Acts: add to a counter, clear or delete it, cancel one of its events; change or delete a namespace.
import { counterPath, exchange, newToken } from "./api.js";
import { confirmation, dialog, h, ofNamespace, say, signed } from "./dom.js";

export const INTEGER = "[+\\-]?\\d{1,19}";

// The buttons of a counter; of one that is not there, only to add.
export function counterActs(namespace, counter, isRough, isThere) {
  const path = counterPath(namespace, counter);
  const button = (id, text, act) => h("button", { type: "button", class: "quiet", id, onclick: act }, text);
  return h("div", { class: "row acts" },
    button("act-add", "Add", () => add(path, counter, isRough, isThere)),
    isThere ? button("act-clear", "Clear", () => clear(path, counter)) : null,
    isThere && !isRough ? button("act-delete", "Delete", () => remove(path, counter, namespace)) : null);
}

// A write under a token that the page makes, shows, and keeps until there is a definite answer.
export class Write {
  constructor(method, path) {
    // By payload: each is another write, and one that was sent without an answer may be sent again later.
    Object.assign(this, { method, path, tokens: new Map() });
    this.shown = h("code", { class: "token" }, "made when you send it");
    this.element = h("p", { class: "fine" }, "Token: ", this.shown, ". Until there is an answer, sending again uses the same one, and counts once.");
  }

  async send(payload) {
    const token = this.tokens.get(payload) ?? (await newToken());
    this.tokens.set(payload, token);
    this.shown.textContent = token.token;
    const body = `{${payload}"idempotency_token": ${JSON.stringify(token)}}`;
    try {
      return (await exchange(this.method, this.path, body)).body;
    } catch (error) {
      if (error.body?.applied === false) this.tokens.delete(payload); // Decided: sent again, it is another write.
      throw error;
    }
  }
}

// Inputs of the two bounds, which may be empty, and what is in them, also as members of JSON: numbers past 2^53 keep their digits.
export function boundInputs(prefix, about, now = {}) {
  const inputs = Object.entries({ at_least: "At least", at_most: "At most" }).map(([name, text]) => {
    const input = h("input", { id: `${prefix}-${name}`, type: "text", inputmode: "numeric", pattern: INTEGER, autocomplete: "off", value: now[name] ?? "" });
    return { name, input, part: h("div", {}, h("label", { for: input.id }, text), input) };
  });
  const values = () => Object.fromEntries(inputs.filter(({ input }) => input.value.trim()).map(({ name, input }) => [name, BigInt(input.value.trim())]));
  const members = () => Object.entries(values()).map(([name, value]) => `"${name}": ${value}`);
  return { values, members, element: h("fieldset", {}, h("legend", { class: "fine" }, about), h("div", { class: "pair" }, inputs.map(({ part }) => part))) };
}

function add(path, counter, isRough, isThere) {
  const delta = h("input", { id: "add-delta", type: "text", inputmode: "numeric", pattern: INTEGER, required: true, value: "1", autocomplete: "off" });
  const bounds = boundInputs("add", "If the count would pass a bound, nothing is added.");
  const write = new Write("POST", `${path}/add`);
  dialog(`Add to ${counter}`, [
    h("label", { for: "add-delta" }, "How much; a negative number subtracts"), delta,
    isRough ? null : h("details", {}, h("summary", {}, "Bounds"), bounds.element),
    isRough ? h("p", { class: "fine" }, "A best-effort counter counts every request: sending again counts again.") : write.element,
  ], "Add", async (_, box) => {
    const number = BigInt(delta.value.trim());
    const { replayed } = await write.send([`"delta": ${number}`, ...bounds.members(), ""].join(", "));
    box.close();
    say(`${signed(number)} is counted${replayed ? " already" : ""}.`);
    if (!isThere) reload();
  });
}

function clear(path, counter) {
  const write = new Write("POST", `${path}/clear`);
  const about = h("p", {}, "The count becomes 0 as of now. Adds with an earlier time are erased, also if they arrive later.");
  confirmation(`Clear ${counter}?`, [about, write.element], "name", counter, "Clear", async () => {
    await write.send("");
    say(`${counter} is cleared.`);
  });
}

function remove(path, counter, namespace) {
  const write = new Write("DELETE", path);
  const about = h("p", {}, "The count becomes 0, and the counter is no longer listed. A later add counts from 0.");
  confirmation(`Delete ${counter}?`, [about, write.element], "name", counter, "Delete", async () => {
    await write.send("");
    say(`${counter} is deleted.`);
    location.hash = ofNamespace(namespace);
  });
}

// Cancels an event of the log under its own token, which each attempt sends; then *done* gets what to say.
export function cancel(path, counter, event, done) {
  const what = event.clear ? "the clear" : signed(event.delta);
  const bounds = ["at_least", "at_most"].filter((name) => name in event).map((name) => `, "${name}": ${event[name]}`);
  const payload = event.clear ? `"operation": "clear"` : `"delta": ${event.delta}${bounds.join("")}`;
  const token = { token: event.event_id, generation_time: event.event_time };
  confirmation(`Cancel ${what} of ${counter}?`, [
    h("p", {}, event.clear
      ? "What it erased counts again. If the counter was deleted by it, it is listed again."
      : "It counts nothing from now on, and every retry of it is rejected."),
    h("p", {}, "The event is removed from the log. This cannot be undone."),
    h("p", { class: "fine" }, "Token: ", h("code", { class: "token" }, token.token)),
  ], "name", counter, "Cancel it", async () => {
    const { body } = await exchange("POST", `${path}/cancel`, `{${payload}, "idempotency_token": ${JSON.stringify(token)}}`);
    done(`${what} is cancelled; it was ${body.was_counted ? "" : "not "}counted.`);
  }, "Keep it");
}

export const reload = () => window.dispatchEvent(new Event("hashchange"));

const CHANGEABLE = {
  accept_limit: "How old a token may be before it is resolved instead; a change applies from a later slice on.",
  future_limit: "How far in the future a token’s time may be.",
  key_ttl: "How long an arbitrary key is remembered.",
  cache_ttl: "How long a rolled-up count may come from the cache.",
  payload_check: "off, guard or strict.",
  requests_per_s: "Requests that each process accepts in a second; 0 for any number.",
  adds_per_s: "Adds, likewise.",
};

// The buttons of a namespace.
export function namespaceActs(name) {
  return h("div", { class: "row acts" },
    h("button", { type: "button", class: "quiet", id: "act-change", onclick: () => change(name) }, "Change settings"),
    h("button", { type: "button", class: "quiet", id: "act-drop", onclick: () => drop(name) }, "Delete namespace"));
}

async function change(name) {
  const path = `v1/namespaces/${encodeURIComponent(name)}`;
  const { body: now, etag } = await exchange("GET", path);
  const fields = Object.entries(CHANGEABLE).filter(([each]) => each in now).map(([each, about]) => {
    const input = h("input", { id: `set-${each}`, type: "text", value: String(now[each]), required: true, autocomplete: "off", spellcheck: "false", "aria-describedby": `about-${each}` });
    return { each, input, parts: [h("label", { for: `set-${each}` }, each), input, h("p", { class: "fine", id: `about-${each}` }, about)] };
  });
  const bounds = boundInputs("set", [h("strong", {}, "bounds"), " that every add to a counter of the namespace keeps; nothing for none"], now.bounds);
  const before = String(bounds.members());
  dialog(`Change ${name}`, [fields.map(({ parts }) => parts), now.counter_type === "BEST_EFFORT" ? [] : bounds.element], "Change", async (_, box) => {
    const changed = fields.filter(({ each, input }) => input.value.trim() !== String(now[each]));
    const asked = Object.fromEntries(changed.map(({ each, input }) => [each, JSON.stringify(typeof now[each] === "number" ? Number(input.value) : input.value.trim())]));
    if (String(bounds.members()) !== before) asked.bounds = `{${bounds.members()}}`;
    if (!Object.keys(asked).length) return box.close();
    const members = Object.entries(asked).map(([each, value]) => `"${each}": ${value}`);
    // Not over what someone else changed meanwhile.
    const { body } = await exchange("PUT", path, `{${members}}`, undefined, { "If-Match": etag });
    box.close();
    say([`${Object.keys(asked).join(", ")} of ${name} changed.`, ...(body.warnings ?? [])].join(" "));
    reload();
  });
}

function drop(name) {
  confirmation(`Delete the namespace ${name}?`, [
    h("p", {}, "Its counters, events and tokens are deleted for ever. A namespace that is created later with this name knows none of the old tokens."),
  ], "name", name, "Delete", async () => {
    await exchange("DELETE", `v1/namespaces/${encodeURIComponent(name)}`);
    say(`The namespace ${name} is deleted.`);
    location.hash = "#/";
  });
}
