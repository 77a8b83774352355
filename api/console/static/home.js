// The first page: what all namespaces do, their busiest, largest and latest counters, and their cards.
import { get } from "./api.js";
import { ratesChart } from "./chart.js";
import { age, code, grouped, h, ofCounter, ofNamespace, rate, seconds, table } from "./dom.js";
import { keyed, live, Sparkline } from "./live.js";
import { choice, create } from "./namespaces.js";

const EVERY_MS = 5000;
const BUSY = 10;
const BUSY_NAMESPACES = 8; // Each is a request every five seconds.

export async function homeView(place, signal) {
  const [{ namespaces }, first] = await Promise.all([get("v1/namespaces", signal), get("v1/overview", signal)]);
  const kept = namespaces.filter((each) => each.counter_type !== "BEST_EFFORT");
  let now = first;
  const [totals, trend, busy, lists] = [tiles(), adds(() => now, signal), busiest(kept, signal), sorted()];
  const parts = [totals, trend, lists];
  const load = async () => {
    now = await get("v1/overview", signal);
    paint();
    await busy.load();
  };
  const facts = (name) => factsOf(now.namespaces.find((each) => each.namespace === name));
  const paint = () => {
    parts.forEach((each) => each.update(now));
    place.querySelectorAll("[data-facts]").forEach((each) => (each.textContent = facts(each.dataset.facts)));
  };
  place.append(
    h("div", { class: "row between" }, h("h1", {}, "Counters"), live(load, EVERY_MS, signal)),
    totals.element, trend.element, busy.element, lists.element,
    h("div", { class: "row between" }, h("h2", {}, "Namespaces"), h("button", { type: "button", id: "new-namespace", class: "quiet", onclick: create }, "New namespace")),
    namespaces.length
      ? choice(namespaces, facts)
      : h("p", { class: "empty" }, "There is no namespace that you can see. Create one, or use another API key."),
    h("p", { class: "lead" }, "A namespace is a set of counters with common settings. ",
      h("a", { href: "#/lab" }, "New here? The retry lab shows in a minute what this service is for.")));
  paint();
  await busy.load();
}

const several = (number, isWhole, one) => `${grouped(number)}${isWhole ? "" : "+"} ${one}${number === 1 && isWhole ? "" : "s"}`;

// What a namespace does now, in words; of the hundred that the overview has.
function factsOf(each) {
  if (!each) return "";
  const late = each.overdue_seconds > 5 ? `rollup ${seconds(each.overdue_seconds)} overdue` : `rolled up to ${seconds(each.lag_seconds)} ago`;
  const parts = [each.counters === null ? null : several(each.counters, each.counters_complete, "counter"), each.adds_per_s === null ? null : `${rate(each.adds_per_s)} adds/s`, late];
  return parts.filter(Boolean).join(" · ");
}

function tiles() {
  const part = (name) => {
    const value = h("dd", { class: "value" }, "–");
    return { value, element: h("div", {}, h("dt", {}, name), value) };
  };
  const [spaces, counters, adds, recent, rollup] = ["Namespaces", "Counters", "Adds a second", "Adds in 15 min", "Rollup"].map(part);
  const update = (now) => {
    const { namespaces, counters: number, complete, overdue_seconds: worst } = now.totals;
    spaces.value.textContent = grouped(namespaces);
    counters.value.textContent = `${grouped(number)}${complete ? "" : "+"}`;
    adds.value.textContent = now.adds.length ? rate(now.adds.at(-1).adds_per_s) : "–";
    recent.value.textContent = grouped(Math.round(sumOf(now.adds)));
    rollup.value.replaceChildren(h("a", { class: "plain", href: "#/health" }, worst > 5 ? `${seconds(worst)} overdue` : "on time"));
  };
  return { update, element: h("dl", { class: "tiles" }, [spaces, counters, adds, recent, rollup].map((each) => each.element)) };
}

// The adds of all steps; the first of them begins as long before its end as the second one.
function sumOf(adds) {
  const ends = adds.map((each) => Date.parse(each.time) / 1000);
  return adds.reduce((sum, each, at) => sum + each.adds_per_s * (at ? ends[at] - ends[at - 1] : 5), 0);
}

// Adds a second of the last fifteen minutes.
function adds(now, signal) {
  const plot = h("div", {}, h("p", { class: "empty" }, "The first rates come in a moment."));
  const element = h("section", { "aria-label": "Adds a second" },
    h("figure", {}, h("figcaption", {}, "Adds a second that this process counted, in the namespaces that you see: in the last 15 minutes, or since it began."), plot));
  let chart = null;
  const samples = () => [now().adds.map((each) => Date.parse(each.time) / 1000), now().adds.map((each) => each.adds_per_s)];
  const update = ({ adds }) => {
    if (adds.length < 2) return;
    if (chart) return chart.draw();
    chart = ratesChart([{ label: "Adds", colour: "--accent" }], samples, signal, 150);
    plot.replaceChildren(chart.box);
  };
  return { update, element };
}

// The busiest counters of the namespaces, the busiest first; nothing if nothing is added to.
function busiest(namespaces, signal) {
  const watched = namespaces.slice(0, BUSY_NAMESPACES).map((each) => each.namespace);
  const [body, rows] = [h("tbody"), new Map()];
  const made = (each) => {
    const [perS, count] = [h("td", { class: "number" }), h("td", { class: "number" })];
    const line = new Sparkline(`Adds per second of ${each.counter}`);
    const row = h("tr", {}, h("th", { scope: "row" }, link(each), h("div", { class: "fine narrow" }, each.namespace)), h("td", { class: "wide" }, h("a", { class: "plain", href: ofNamespace(each.namespace) }, each.namespace)), h("td", {}, line.element), perS, count);
    const update = (now) => {
      line.push(now.adds_per_s);
      perS.textContent = rate(now.adds_per_s);
      count.textContent = grouped(now.count);
    };
    return { row, update };
  };
  const load = async () => {
    const found = await Promise.all(watched.map((each) => get(`v1/namespaces/${encodeURIComponent(each)}/busiest?limit=${BUSY}`, signal).catch((error) => {
      if (error.body?.status === 404) return { namespace: each, counters: [] }; // Deleted meanwhile.
      throw error;
    })));
    const all = found.flatMap(({ namespace, counters: some }) => some.map((each) => ({ namespace, ...each })));
    all.sort((a, b) => b.adds_per_s - a.adds_per_s);
    keyed(body, rows, all.slice(0, BUSY), keyOf, made);
    element.hidden = rows.size === 0;
  };
  const list = table("Busiest counters", ["Counter", { text: "Namespace", wide: true }, "Trend", { text: "Adds/s", number: true }, { text: "Count", number: true }], []);
  list.querySelector("tbody").replaceWith(body);
  const element = h("section", { hidden: true }, h("h2", {}, "Busiest now"), list,
    namespaces.length > watched.length ? h("p", { class: "fine" }, `Of the first ${watched.length} of ${namespaces.length} namespaces.`) : null);
  return { load, element };
}

const keyOf = (each) => `${each.namespace}/${each.counter}`;
const link = (each) => h("a", { href: ofCounter(each.namespace, each.counter) }, each.counter);

// The largest and the latest counters, side by side.
function sorted() {
  const part = (title, heads, cells) => {
    const [body, rows] = [h("tbody"), new Map()];
    const list = table(title, heads, []);
    list.querySelector("tbody").replaceWith(body);
    const made = (each) => {
      const found = cells();
      return { row: h("tr", {}, h("th", { scope: "row" }, link(each), " ", h("span", { class: "fine" }, each.namespace)), found.map(([cell]) => cell)), update: (now) => found.forEach(([cell, fill]) => cell.replaceChildren(fill(now))) };
    };
    return { element: h("section", {}, h("h2", {}, title), list), update: (items) => keyed(body, rows, items, keyOf, made) };
  };
  const count = () => [h("td", { class: "number" }), (each) => grouped(each.count)];
  const changed = () => [h("td", { class: "number fine" }, ""), (each) => age(each.changed_at)];
  const largest = part("Largest", ["Counter", { text: "Count", number: true }], () => [count()]);
  const latest = part("Latest", ["Counter", { text: "Changed", number: true }, { text: "Count", number: true }], () => [changed(), count()]);
  const pair = h("div", { class: "pair" }, largest.element, latest.element);
  const none = h("p", { class: "empty" }, "No counter yet. The first add to a name creates it: ", code("POST /v1/namespaces/default/counters/likes/add"));
  const some = h("p", { class: "fine" }, "Not all counters are among them: some namespaces are not surveyed yet, or have more than 10 000 counters.");
  const update = (now) => {
    largest.update(now.largest);
    latest.update(now.latest);
    pair.hidden = !(none.hidden = now.latest.length > 0);
    some.hidden = now.totals.complete;
  };
  return { update, element: h("section", { "aria-label": "Largest and latest counters" }, pair, none, some) };
}
