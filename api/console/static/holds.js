// Holds of a counter: those that are open, what becomes of them, and a budget as a bar.
import { boundInputs, INTEGER, reload, Write } from "./acts.js";
import { exchange, get, isFinal, Problem } from "./api.js";
import { age, code, dialog, grouped, h, say, signed, table, time } from "./dom.js";
import { keyed, repeat } from "./live.js";
import { problemBox } from "./problems.js";

const EVERY_MS = 5000;
const SOON_MS = 500;
const SHOWN = 20;
const SHORT = 16;
const LASTS = "15m";
// Bounds that the reader gave for a bar, by the path of their counter; in memory.
const given = new Map();

const lastsInput = (id) => h("input", { id, type: "text", value: LASTS, required: true, autocomplete: "off", spellcheck: "false", "aria-describedby": `${id}-about` });
const lastsAbout = (id) => h("p", { class: "fine", id: `${id}-about` }, "Such as 30s, 15m or 2h.");

// The button that begins a hold; *changed* is called after it.
export function holdButton(path, counter, changed) {
  return h("button", { type: "button", class: "quiet", id: "act-hold", onclick: () => hold(path, counter, changed) }, "Hold");
}

function hold(path, counter, changed) {
  const amount = h("input", { id: "hold-amount", type: "text", inputmode: "numeric", pattern: INTEGER, required: true, autocomplete: "off" });
  const lasts = lastsInput("hold-lasts");
  const bounds = boundInputs("hold", "If the count and what is held would pass a bound, nothing is held.");
  const write = new Write("POST", `${path}/holds`);
  dialog(`Hold an amount of ${counter}`, [
    h("label", { for: amount.id }, "How much; a negative number holds what is to be subtracted"), amount,
    h("label", { for: lasts.id }, "Expires in"), lasts, lastsAbout(lasts.id),
    h("details", {}, h("summary", {}, "Bounds"), bounds.element),
    write.element,
  ], "Hold", async (_, box) => {
    const number = BigInt(amount.value.trim());
    const made = await write.send([`"amount": ${number}`, `"expires_in": ${JSON.stringify(lasts.value.trim())}`, ...bounds.members(), ""].join(", "));
    box.close();
    say(`${signed(made.amount)} is held.`);
    changed();
  });
}

// A dialog that changes one hold by *request*, which returns what to say.
function change(title, parts, verb, request, changed) {
  return dialog(title, parts, verb, async (_, box) => {
    let done;
    try {
      done = await request();
    } catch (error) {
      changed(); // It may have ended.
      throw error;
    }
    box.close();
    document.getElementById("main").focus({ preventScroll: true }); // The row may go.
    say(done);
    changed();
  });
}

const about = (each) => h("p", { class: "fine" }, "Hold: ", h("code", { class: "token" }, each.hold));

function settle(path, each, changed) {
  const amount = h("input", { id: "settle-amount", type: "text", inputmode: "numeric", pattern: INTEGER, required: true, value: each.amount, autocomplete: "off", "aria-describedby": "settle-about" });
  change(`Settle the hold of ${signed(each.amount)}`, [
    h("label", { for: amount.id }, "What it cost"), amount,
    h("p", { class: "fine", id: "settle-about" }, "This counts, in full if it is more than was held, and the hold ends. Until there is an answer, the same amount may be sent again: it counts once."),
    about(each),
  ], "Settle", async () => {
    const { body } = await exchange("POST", `${path}/settle`, `{"amount": ${BigInt(amount.value.trim())}}`);
    return `${signed(body.settled)} is counted, and the hold has ended${body.over ? "; it is more than was held" : ""}.`;
  }, changed);
}

function release(path, each, changed) {
  const { button } = change(`Release the hold of ${signed(each.amount)}?`, [
    h("p", {}, "The amount is free again, and nothing is counted. The client of the hold can no longer settle it: it gets an error, and must add what it used."),
    about(each),
  ], "Release", async () => {
    await exchange("POST", `${path}/release`);
    return `The hold of ${signed(each.amount)} is released.`;
  }, changed);
  button.classList.add("danger");
}

function extend(path, each, changed) {
  const lasts = lastsInput("extend-lasts");
  change(`Extend the hold of ${signed(each.amount)}`, [
    h("label", { for: lasts.id }, "Expires in, from now"), lasts, lastsAbout(lasts.id),
    h("p", { class: "fine" }, "It never expires earlier than before, nor later than a tenth of the retention after it began."),
    about(each),
  ], "Extend", async () => {
    const { body } = await exchange("PATCH", path, { expires_in: lasts.value.trim() });
    return `The hold expires at ${time(body.expires_at).textContent}.`;
  }, changed);
}

// An id begins with the time of its token in microseconds, eight bytes.
function begun(id) {
  const bytes = atob(id.slice(0, 12).replaceAll("-", "+").replaceAll("_", "/"));
  const us = [...bytes.slice(0, 8)].reduce((sum, each) => sum * 256 + each.charCodeAt(0), 0);
  return new Date(us / 1000).toISOString();
}

function idCell(id) {
  const shown = h("code", { title: id }, `${id.slice(0, SHORT)}…`);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(id);
      say("The id of the hold is copied.");
      button.textContent = "Copied";
    } catch {
      shown.textContent = id;
      getSelection().selectAllChildren(shown);
      say("The id of the hold is selected: copy it with the keyboard.");
    }
  };
  const button = h("button", { type: "button", class: "quiet small", "aria-label": `Copy the id ${id.slice(0, SHORT)}…`, onclick: copy }, "Copy");
  return h("th", { scope: "row" }, h("div", { class: "row id" }, shown, button));
}

function holdRow(namespace, each, changed) {
  const path = `v1/namespaces/${encodeURIComponent(namespace)}/holds/${each.hold}`;
  const expires = h("td", { class: "fine" });
  const button = (text, act) => h("button", { type: "button", class: "quiet small", "aria-label": `${text} the hold of ${signed(each.amount)}, ${each.hold.slice(0, SHORT)}…`, onclick: () => act(path, each, changed) }, text);
  const row = h("tr", {}, idCell(each.hold), h("td", { class: "number" }, signed(each.amount)),
    h("td", { class: "fine wide" }, age(begun(each.hold))), expires,
    h("td", {}, h("div", { class: "row" }, button("Settle", settle), button("Release", release), button("Extend", extend))));
  const update = ({ expires_at }) => {
    if (expires.firstChild?.dateTime !== expires_at) expires.replaceChildren(age(expires_at));
  };
  return { row, update };
}

// The open holds of a counter, what they hold, and bars of its bounds: *own* of its namespace, and others that *note* finds
// in events. *refresh* are called when the count or the holds change.
export async function holdsPart(namespace, counter, path, own, signal, refresh) {
  const query = new URLSearchParams({ counter, limit: SHOWN });
  const [held, budgets, trouble] = [h("p", { id: "held" }), h("div", { id: "budgets" }), h("div")];
  const list = table("Open holds", ["Hold", { text: "Amount", number: true }, { text: "Since", wide: true }, "Expires", "Change"], [], { class: "holds" });
  const none = h("p", { class: "fine none" }, "There are no open holds.");
  const more = h("p", { class: "fine" });
  const rows = new Map();
  let [count, seen, soon, listed] = [null, {}, false, null];
  const draw = () => {
    const bars = count === null ? [] : ["at_most", "at_least"].map((name) => barOf(name, count, [
      [given.get(path)?.[name], "chosen here"], [own?.[name], "of the namespace"], [seen[name], "of the latest event that has one"]]));
    budgets.replaceChildren(...bars.filter(Boolean));
  };
  const show = (found, { holds, next_page }) => {
    count = found;
    held.textContent = heldText(count);
    held.hidden = !held.textContent;
    // A row that has ended does not stay for its focus.
    const open = new Set(holds.map((each) => each.hold));
    if ([...rows].some(([id, { row }]) => !open.has(id) && row.contains(document.activeElement))) document.getElementById("main").focus({ preventScroll: true });
    keyed(list.querySelector("tbody"), rows, holds, (each) => each.hold, (each) => holdRow(namespace, each, changed));
    list.hidden = !rows.size;
    none.hidden = rows.size > 0;
    more.replaceChildren(...(next_page ? [`The ${holds.length} that expire first; all of them by `, code("GET …/holds"), "."] : []));
    trouble.replaceChildren();
    draw();
    // A hold and its end are events, also while the count stays the same.
    const ids = [...open].join();
    if (listed !== null && listed !== ids) refresh.filter((each) => each !== changed).forEach((each) => each());
    listed = ids;
  };
  const load = async () => {
    soon = false;
    try {
      show(...(await Promise.all([get(`${path}?max_staleness=0s`, signal), get(`v1/namespaces/${encodeURIComponent(namespace)}/holds?${query}`, signal)])));
    } catch (error) {
      if (signal.aborted) return null;
      if (!(error instanceof Problem)) throw error;
      if (error.body.status === 501) return noneHere(error.body);
      // The count shows already that there is no answer.
      if (error.body.code !== "no_answer" || count === null) trouble.replaceChildren(problemBox(error.body, () => load().then(plan)));
      if (isFinal(error.body)) return null;
    }
    return soon ? SOON_MS : EVERY_MS;
  };
  const changed = () => {
    if (soon || section.id) return;
    soon = true;
    plan(SOON_MS);
  };
  const noneHere = ({ detail }) => {
    section.id = "no-holds";
    section.replaceChildren(h("p", { class: "fine" }, `There are no holds here: ${detail}.`));
    return null;
  };
  const budget = h("button", { type: "button", class: "quiet small", id: "act-budget", onclick: () => chooseBudget(path, counter, draw) }, "Show a budget");
  const section = h("section", { "aria-labelledby": "holds" }, h("div", { class: "row between" }, h("h2", { id: "holds" }, "Holds"), none, budget), trouble, list, more);
  const plan = repeat(load, EVERY_MS, signal, await load());
  refresh.push(changed);
  const note = (events) => {
    seen = Object.fromEntries(["at_most", "at_least"].map((name) => [name, events.find((each) => name in each)?.[name]]));
    draw();
  };
  return { element: section, held, budgets, note };
}

function heldText({ held = 0, held_down = 0 }) {
  const parts = [held, held_down].filter((each) => String(each) !== "0").map(signed);
  return parts.length ? `${parts.join(" and ")} held` : "";
}

function chooseBudget(path, counter, draw) {
  const bounds = boundInputs("budget", "The page shows what is counted, what is held, and the room up to these. They are of this page only, until it is reloaded: they refuse nothing.", given.get(path));
  dialog(`A budget of ${counter}`, [bounds.element], "Show", (_, box) => {
    given.set(path, bounds.values());
    box.close();
    draw();
  });
}

// A bar of the bound *name*, which is the first that there is of *bounds*: each a value, and whose it is; null without one.
function barOf(name, { count, held = 0, held_down = 0, as_of }, bounds) {
  const [value, whose] = bounds.find(([each]) => each != null) ?? [];
  if (value === undefined) return null;
  const [now, bound, isMost] = [BigInt(count), BigInt(value), name === "at_most"];
  const taken = isMost ? BigInt(held) : -BigInt(held_down);
  const left = isMost ? bound - now - taken : now - taken - bound;
  const parts = [["counted", now], ["held", taken], ["room", left > 0n ? left : 0n]].slice(isMost ? 0 : 1);
  if (left < 0n) parts.push(["over", -left]);
  return h("figure", { class: "budget", "data-bound": name },
    h("figcaption", {}, `${isMost ? "At most" : "At least"} ${grouped(bound)}, ${whose}; exact as of `, time(as_of)),
    bar(parts.filter(([, size]) => size > 0n)),
    h("ul", { class: "legend" }, parts.map(([kind, size]) => h("li", { class: kind }, kind, " ", h("strong", {}, grouped(size))))));
}

// The text below it has the numbers. What is over lies within the others, at their end.
function bar(parts) {
  const all = parts.reduce((sum, [kind, size]) => (kind === "over" ? sum : sum + size), 0n);
  const percent = (size) => Number((size * 100000n) / all) / 1000;
  return h("div", { class: "bar", "aria-hidden": "true" }, parts.map(([kind, size]) => {
    const made = h("span", { class: kind });
    // By the object model: the policy of the page forbids the attribute.
    if (kind !== "over") made.style.flexGrow = String(percent(size));
    else made.style.width = `${all > 0n ? Math.min(100, percent(size)) : 100}%`;
    return made;
  }));
}
