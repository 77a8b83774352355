// One counter: its count, live; its history; its recent events.
import { counterPath, download, exchange, get, isFinal, listen, noteClock, now, Problem } from "./api.js";
import { cancel, counterActs, reload } from "./acts.js";
import { historyChart } from "./chart.js";
import { holdButton, holdsPart } from "./holds.js";
import { repeat, whileVisible } from "./live.js";
import { age, code, grouped, h, micros, ofCounter, ofNamespace, say, seconds, signed, table, time } from "./dom.js";
import { problemBox } from "./problems.js";

const SPANS = [["15 min", 900, 15], ["1 h", 3600, 60], ["24 h", 86400, 900], ["7 d", 604800, 7200], ["30 d", 2592000, 28800]];
const EVENTS = 20;
const NEAR = 5;
const SILENCE_MS = 15000; // A stream sends the count at least every five seconds.
const ACCURACY = {
  accurate: "It includes every add that was acknowledged by then.",
  eventual: "Rolled up: exact as of then; later adds follow within seconds.",
  best_effort: "Best effort: retries count twice, and the cache may lose it.",
};

export async function counterView(place, signal, namespace, counter) {
  if (/^\.\.?$/.test(counter)) return unaddressable(place, signal, namespace, counter);
  const path = counterPath(namespace, counter);
  const [settings, exact] = await Promise.all([
    get(`v1/namespaces/${encodeURIComponent(namespace)}`, signal),
    get(`${path}?max_staleness=0s`, signal),
  ]);
  noteClock(exact.as_of);
  // With the staleness of the stream's counts, so that the number does not decrease when it begins.
  const count = settings.counter_type === "EVENTUAL" ? await get(path, signal) : exact;
  const rough = settings.counter_type === "BEST_EFFORT";
  const main = h("div");
  place.append(
    h("nav", { class: "crumbs", "aria-label": "Where you are" }, h("a", { href: "#/" }, "Namespaces"), " / ",
      h("a", { href: ofNamespace(namespace) }, namespace), " / ", h("span", { "aria-current": "page" }, counter)),
    h("h1", { class: "name" }, counter), main);
  const refresh = []; // Called when the count or its holds change.
  const changed = () => refresh.forEach((each) => each());
  const acts = (isThere) => {
    const row = counterActs(namespace, counter, rough, isThere);
    if (!rough) row.firstChild.after(holdButton(path, counter, isThere ? changed : reload));
    main.before(row);
  };
  if (!rough && String(exact.count) === "0" && !(await isListed(namespace, counter, signal))) {
    main.append(await nothing(namespace, counter, signal));
    return acts(false);
  }
  acts(true);
  const big = countPart(count, path, signal, changed);
  main.append(big);
  if (rough) {
    main.append(h("p", { class: "empty" }, "A BEST_EFFORT counter keeps no events, so there is no history to show."));
    return;
  }
  const holds = await holdsPart(namespace, counter, path, settings.bounds, signal, refresh);
  big.querySelector("#count").after(holds.held);
  big.append(await sumsPart(path, settings, signal), holds.budgets);
  main.append(holds.element, await historyPart(path, counter, settings, signal), await eventsPart(path, counter, signal, refresh, holds.note));
}

const listed = async (namespace, prefix, limit, signal) =>
  (await get(`v1/namespaces/${encodeURIComponent(namespace)}/counters?${new URLSearchParams({ prefix, limit })}`, signal)).counters;

const isListed = async (namespace, counter, signal) => (await listed(namespace, counter, 1, signal))[0] === counter;

// Says that there is no such counter, with those whose names begin alike.
async function nothing(namespace, counter, signal) {
  const letters = [...counter];
  const near = await listed(namespace, letters.slice(0, Math.ceil(letters.length / 2)).join(""), NEAR, signal);
  return h("section", { class: "empty", id: "nothing" },
    h("p", {}, "Nothing was ever counted here, or it was deleted. The first add creates the counter: ", code(`POST /${counterPath(namespace, counter)}/add`)),
    near.length ? h("p", {}, "Did you mean ", near.flatMap((name, place) => [place ? ", " : "", h("a", { href: ofCounter(namespace, name) }, name)]), "?") : null);
}

// How much the count changed in the last hour, and in the last day beside the day before; exact until now.
async function sumsPart(path, settings, signal) {
  const window = micros(settings.rollup_window) / 1000;
  const ago = (hours) => new Date(Math.floor((now() - hours * 3600000) / window) * window).toISOString();
  const tile = (name) => {
    const [value, about] = [h("dd", { class: "value" }, "–"), h("dd", { class: "fine" })];
    return { value, about, element: h("div", {}, h("dt", {}, name), value, about) };
  };
  const [hour, day] = [tile("Last hour"), tile("Last day")];
  const change = async (span) => {
    try {
      return signed((await get(`${path}?${new URLSearchParams(span)}`, signal)).delta);
    } catch (error) {
      if (error.body?.code === "invalid_parameter") return "–"; // Older than what is kept.
      throw error;
    }
  };
  const load = async () => {
    try {
      const [lastHour, lastDay, dayBefore] = await Promise.all([
        change({ from: ago(1) }), change({ from: ago(24) }), change({ from: ago(48), to: ago(24) })]);
      hour.value.textContent = lastHour;
      day.value.textContent = lastDay;
      day.about.textContent = `${dayBefore} the day before`;
    } catch (error) {
      if (!signal.aborted && !(error instanceof Problem)) throw error; // The count shows the failure.
    }
  };
  await load();
  repeat(load, 10000, signal);
  return h("dl", { class: "tiles" }, hour.element, day.element);
}

// A browser resolves "." and ".." in a path, however they are encoded: only a body can name such counters.
async function unaddressable(place, signal, namespace, counter) {
  const { body } = await exchange("POST", `v1/namespaces/${namespace}/batch/get`, { counters: [counter] }, signal);
  place.append(h("h1", { class: "name" }, counter),
    h("section", { class: "panel", "aria-label": "Count" }, h("p", { class: "count", id: "count" }, grouped(body.results[0].count)),
      h("p", { class: "fine" }, "A browser cannot request the history of a counter with this name; curl --path-as-is can.")));
}

function countPart(first, path, signal, changed) {
  const number = h("p", { class: "count", id: "count" });
  const about = h("p", { class: "fine", id: "as-of" });
  const state = h("span", { class: "state", id: "live" }, "Connecting");
  const trouble = h("div");
  let latest = first;
  let heard = 0;
  const paint = () => {
    const age = (now() - Date.parse(latest.as_of)) / 1000;
    about.replaceChildren(latest.accuracy === "best_effort" ? "As of " : "Exact as of ", time(latest.as_of), ` (${age < 1 ? "now" : `${seconds(age)} ago`}) · `,
      h("strong", {}, latest.accuracy.replace("_", " ")), `. ${ACCURACY[latest.accuracy]}`);
  };
  const take = (count) => {
    const isNew = count.count !== latest.count;
    latest = count;
    number.textContent = grouped(count.count);
    number.classList.toggle("long", String(count.count).length > 12);
    paint();
    if (isNew) {
      // At most one in a while, and only the last of them.
      say(`The count is ${count.count}.`, 2000);
      changed();
    }
  };
  const tellState = (text, kind) => {
    state.textContent = text;
    state.className = `state ${kind}`;
  };
  take(first);
  const hear = (kind, data) => {
    if (kind === "count") {
      heard = performance.now();
      trouble.replaceChildren();
      tellState("Live", "on");
      take(data);
    } else if (kind === "problem") {
      tellState("Not live", "off");
      trouble.replaceChildren(problemBox(data));
    }
  };
  whileVisible((visible) => listen(`${path}/live`, visible, hear), signal);
  const timer = setInterval(() => {
    paint();
    if (state.textContent === "Live" && performance.now() - heard > SILENCE_MS) tellState("Not live", "off");
  }, 1000);
  signal.addEventListener("abort", () => clearInterval(timer));
  return h("section", { class: "panel", "aria-label": "Count" }, h("div", { class: "row between" }, number, state), about, trouble);
}

// The step of the request, in microseconds: near the chosen one, and a multiple of the namespace's windows.
const widthOf = (step, window) => Math.ceil((step * 1e6) / window) * window;

function historyQuery(span, width) {
  const to = now() + 1000;
  return new URLSearchParams({ from: new Date(to - span * 1000).toISOString(), to: new Date(to).toISOString(), step: `${width}us` });
}

async function historyPart(path, counter, settings, signal) {
  const box = h("div", { class: "history" });
  const window = micros(settings.rollup_window);
  let chosen = SPANS[0];
  let drawn = new AbortController();
  let drawnFor = null;
  let plan;
  const address = (span, step) => `${path}/history?${historyQuery(span, widthOf(step, window))}`;
  const load = async () => {
    const [name, span, step] = chosen;
    try {
      const { points } = await get(address(span, step), signal);
      if (chosen[0] !== name) return; // Another span was chosen meanwhile.
      drawnFor = name;
      drawn.abort();
      drawn = new AbortController();
      const ended = AbortSignal.any([signal, drawn.signal]);
      box.replaceChildren(points.length
        ? historyChart(points, span, widthOf(step, window) / 1e6, ended)
        : h("p", { class: "empty" }, `Nothing is rolled up in the last ${name} yet: a window closes more than ${settings.accept_limit} after its end.`));
    } catch (error) {
      if (signal.aborted || chosen[0] !== name) return;
      if (!(error instanceof Problem)) throw error;
      // The count shows the failure already: keep the chart.
      if (error.body.code === "no_answer" && drawnFor === name) return;
      drawnFor = null;
      box.replaceChildren(problemBox(error.body, () => load().then(plan)));
      if (isFinal(error.body)) return null;
    }
  };
  const choose = (each, buttons) => {
    chosen = each;
    buttons.forEach((button, place) => button.setAttribute("aria-pressed", SPANS[place] === each));
    return load().then(plan);
  };
  const unsaved = h("div");
  const save = async () => {
    try {
      await download(address(chosen[1], chosen[2]), "text/csv", `${counter}.csv`);
      unsaved.replaceChildren();
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      unsaved.replaceChildren(problemBox(error.body, save));
    }
  };
  const buttons = SPANS.map((each) => h("button", { type: "button", "aria-pressed": each === chosen ? "true" : "false", onclick: () => choose(each, buttons) }, each[0]));
  plan = repeat(async () => (box.querySelector("details[open]") ? undefined : load()), 10000, signal, await load());
  return h("section", { "aria-labelledby": "history" },
    h("div", { class: "row between" }, h("h2", { id: "history" }, "History"), h("div", { class: "choice", role: "group", "aria-label": "Span of the history" }, buttons)),
    box,
    h("div", { class: "row between" }, h("p", { class: "fine" }, "Ends at the watermark. Events older than the retention are known only as a sum."),
      h("button", { type: "button", class: "quiet small", id: "act-csv", onclick: save }, "Download CSV")),
    unsaved);
}

async function eventsPart(path, counter, signal, refresh, seen) {
  const box = h("div", { id: "events" });
  const done = h("p", { id: "cancelled" });
  const cancelled = (text) => {
    say(done.textContent = text);
    return load();
  };
  let busy = false;
  let again = false;
  const load = async () => {
    if (busy) return void (again = true);
    busy = true;
    try {
      const { events, next_page } = await get(`${path}/events?limit=${EVENTS}`, signal);
      seen(events);
      const held = box.contains(document.activeElement) ? document.activeElement.dataset.token : null;
      box.replaceChildren(events.length ? eventsTable(events, next_page, (event) => cancel(path, counter, event, cancelled)) : h("p", { class: "empty" }, "There are no events. The first add to this name creates the counter."));
      if (held) box.querySelector(`[data-token="${held}"]`)?.focus({ preventScroll: true });
    } catch (error) {
      if (signal.aborted) return;
      if (!(error instanceof Problem)) throw error;
      box.replaceChildren(problemBox(error.body, load));
    } finally {
      busy = false;
    }
    if (again) {
      again = false;
      setTimeout(load, 500);
    }
  };
  refresh.push(load);
  await load();
  return h("section", { "aria-labelledby": "events-title" }, h("h2", { id: "events-title" }, "Recent events"), done, box);
}

// What an event did, in words where it is no number.
function changeOf({ clear, delta, refused, hold }) {
  if (clear) return "clear";
  if (refused) return `refused ${hold ? "hold " : ""}${signed(hold?.amount ?? refused.delta)}`;
  if (!hold) return signed(delta);
  return `${hold.state === "begun" ? "hold" : hold.state} ${signed(hold.state === "settled" ? delta : hold.amount)}`;
}

function eventsTable(events, next, cancels) {
  const button = (each) => h("button", { type: "button", class: "quiet small", "data-token": each.event_id,
    "aria-label": `Cancel ${each.clear ? "the clear" : signed(each.delta)} of ${each.event_id}`, onclick: () => cancels(each) }, "Cancel");
  const rows = events.map((each) => h("tr", {},
    h("td", {}, time(each.event_time)),
    h("td", { class: "fine" }, age(each.event_time)),
    h("td", { class: "number" }, changeOf(each)),
    h("td", {}, h("code", { class: "token" }, each.event_id), " ", each.hold ? null : each.event_item_key ? `item ${each.event_item_key}` : each.refused ? null : button(each))));
  return h("div", {}, table("The latest events", ["Time", "Age", { text: "Change", number: true }, "Token"], rows),
    next ? h("p", { class: "fine" }, `The latest ${events.length}; all of them by `, code("GET …/events"), ".") : null,
    events.some((each) => each.event_item_key && !each.hold) ? h("p", { class: "fine" }, "An item of an atomic add, or of a CloudEvent, is cancelled only with all items: by ",
      code("POST …/atomic/cancel"), " or ", code("POST …/events/cancel"), ".") : null);
}
