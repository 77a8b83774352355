// The cards of all namespaces; and one, with its settings, its counters and its rollup.
import { namespaceActs } from "./acts.js";
import { counterPath, exchange, get, Problem } from "./api.js";
import { choices, code, dialog, grouped, h, ofCounter, ofNamespace, rate, say, table, time } from "./dom.js";
import { shardsPart } from "./health.js";
import { keyed, live, Sparkline } from "./live.js";
import { problemBox } from "./problems.js";

const PAGE = 50;
const EVERY_MS = 5000;
const FEW = 12; // So few need no search.
const ABOUT = {
  ACCURATE: "Every read is exact.",
  EVENTUAL: "Counts are exact, and may be a few seconds old.",
  BEST_EFFORT: "Fast and inexact: retries count twice, and the cache may lose it.",
};

const badge = (type) => h("span", { class: `badge ${type.toLowerCase()}`, title: ABOUT[type] }, type);

export function create() {
  const name = h("input", { id: "new-name", type: "text", required: true, maxlength: 63, pattern: "[a-z][a-z0-9_\\-]*", autocomplete: "off", spellcheck: "false", "aria-describedby": "new-about" });
  dialog("New namespace", [
    h("label", { for: "new-name" }, "Name"), name,
    h("p", { class: "fine", id: "new-about" }, "Lower-case letters, digits, _ and -, beginning with a letter. The name and the type cannot be changed later."),
    choices("Type of its counters", "type", Object.entries(ABOUT)),
  ], "Create", async (form, box) => {
    const made = await exchange("PUT", `v1/namespaces/${encodeURIComponent(name.value)}`, { counter_type: form.elements.type.value });
    if (made.status !== 201) throw new Problem({ title: "Not created", detail: `there is a namespace “${name.value}” already` });
    box.close();
    location.hash = ofNamespace(name.value);
    say([`The namespace ${name.value} is created.`, ...(made.body.warnings ?? [])].join(" "));
  });
}

// Cards of all namespaces. One answer contains all of them, so they are filtered and paged here; *facts* returns what one
// does now.
export function choice(namespaces, facts) {
  const card = (each) => h("li", {},
    h("a", { class: "card", href: ofNamespace(each.namespace) },
      h("strong", {}, each.namespace), badge(each.counter_type),
      h("span", { class: "fine" }, ABOUT[each.counter_type]),
      h("span", { class: "fine", "data-facts": each.namespace }, facts(each.namespace))));
  if (namespaces.length <= FEW) return h("ul", { class: "cards" }, namespaces.map(card));
  const body = h("div");
  const input = h("input", { id: "part", type: "search", autocomplete: "off", spellcheck: "false", maxlength: 63, "aria-describedby": "found" });
  const number = h("p", { class: "fine", id: "found" });
  // The filter and the page, kept for a return to this view.
  const began = history.state?.namespaces ?? { asked: "", page: 0 };
  input.value = began.asked;
  let found = [];
  const show = (asked, wanted) => {
    const part = asked.trim().toLowerCase();
    found = namespaces.filter((each) => each.namespace.includes(part));
    const page = Math.max(0, Math.min(wanted, Math.ceil(found.length / PAGE) - 1));
    history.replaceState({ namespaces: { asked, page } }, "");
    number.textContent = part ? `${found.length} of ${namespaces.length} namespaces` : `${namespaces.length} namespaces`;
    say(number.textContent, 500);
    const [first, end] = [page * PAGE, (page + 1) * PAGE];
    const next = end < found.length ? page + 1 : null;
    replace(body, [
      found.length
        ? h("ul", { class: "cards" }, found.slice(first, end).map(card))
        : h("p", { class: "empty" }, `No namespace has “${part}” in its name.`),
      pager({ next_page: next }, Array.from({ length: page + 1 }), (trail) => show(asked, trail.length - 1))]);
  };
  const only = (event) => {
    event.preventDefault();
    if (found.length === 1) location.hash = ofNamespace(found[0].namespace);
  };
  input.addEventListener("input", () => show(input.value, 0));
  show(began.asked, began.page);
  return h("section", { "aria-label": "All namespaces" },
    h("form", { class: "filter", role: "search", onsubmit: only }, h("label", { for: "part" }, "Names that contain"), h("div", { class: "row" }, input, number)),
    body);
}

export async function namespaceView(place, signal, name) {
  const found = await get(`v1/namespaces/${encodeURIComponent(name)}`, signal);
  const rough = found.counter_type === "BEST_EFFORT";
  place.append(
    h("nav", { class: "crumbs", "aria-label": "Where you are" }, h("a", { href: "#/" }, "Namespaces"), " / ", h("span", { "aria-current": "page" }, name)),
    h("div", { class: "title" }, h("h1", {}, name), badge(found.counter_type)),
    search(name),
    rough
      ? h("p", { class: "empty" }, "A BEST_EFFORT namespace has no list of its counters: look one up by its exact name.")
      : await listing(found.namespace, signal),
    h("section", {}, h("div", { class: "row between" }, h("h2", {}, "Settings"), namespaceActs(name)), settings(found)));
  if (!rough) place.append(await shardsPart(name, signal));
}

// A setting with members, such as bounds or the rules of events, as text.
const textOf = (value) => JSON.stringify(value).replaceAll(/[{}[\]"]/g, "").replaceAll(/[,:]/g, "$& ");

function settings(found) {
  const { namespace, created_at, ...rest } = found;
  const rows = [["created", time(created_at)], ...Object.entries(rest).map(([name, value]) => [name, value === 0 ? "any number" : typeof value === "object" ? textOf(value) : String(value)])];
  return h("dl", { class: "settings" }, rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

function search(namespace) {
  const input = h("input", { id: "exact", type: "text", autocomplete: "off", spellcheck: "false", maxlength: 256, required: true });
  const go = (event) => {
    event.preventDefault();
    if (input.value) location.hash = ofCounter(namespace, input.value);
  };
  return h("form", { class: "search", role: "search", onsubmit: go },
    h("label", { for: "exact" }, "Counter, by its exact name"),
    h("div", { class: "row" }, input, h("button", { type: "submit" }, "Show")));
}

async function listing(namespace, signal) {
  const box = h("section", { "aria-labelledby": "counters" });
  const body = h("div");
  const prefix = h("input", { id: "prefix", type: "text", autocomplete: "off", spellcheck: "false", maxlength: 256 });
  const option = (id) => h("input", { id, type: "checkbox", onchange: () => load(prefix.value, [null]) });
  const [largest, summed] = [option("largest"), option("summed")];
  // The prefix and the pages that led here, this one last, kept for a return to this view.
  const began = history.state?.listing ?? { asked: "", trail: [null], isLargest: false };
  prefix.value = began.asked;
  largest.checked = began.isLargest;
  let turn = 0; // Only the answer to the latest request is shown.
  let drawn = null; // What the page shows: how to ask for it again, and to update it.
  const load = async (asked, trail) => {
    const mine = ++turn;
    const query = new URLSearchParams({ limit: PAGE, counts: "true" });
    if (largest.checked) query.set("order", "-count");
    if (summed.checked) query.set("sum", "true");
    if (asked) query.set("prefix", asked);
    if (trail.at(-1)) query.set("page", trail.at(-1));
    let shown;
    try {
      const found = await get(`v1/namespaces/${namespace}/counters?${query}`, signal);
      if (mine !== turn) return;
      const list = counters(namespace, found, asked);
      drawn = { query, update: list.update };
      shown = [list.element, pager(found, trail, (to) => load(asked, to))];
      history.replaceState({ listing: { asked, trail, isLargest: largest.checked } }, "");
      say(`${found.counters.length} counters, page ${trail.length}`);
    } catch (error) {
      if (signal.aborted || mine !== turn) return;
      if (!(error instanceof Problem)) throw error;
      shown = [problemBox(error.body, () => load(asked, trail))];
    }
    replace(body, shown);
  };
  const filter = (event) => {
    event.preventDefault();
    load(prefix.value, [null]);
  };
  const refresh = async () => {
    const asked = drawn;
    if (!asked) return;
    const found = await get(`v1/namespaces/${namespace}/counters?${asked.query}`, signal);
    if (asked === drawn) asked.update(found);
  };
  box.append(
    h("div", { class: "row between" }, h("h2", { id: "counters" }, "Counters"), live(refresh, EVERY_MS, signal)),
    h("form", { class: "filter", onsubmit: filter }, h("label", { for: "prefix" }, "Names that begin with"),
      h("div", { class: "row" }, prefix, h("button", { type: "submit", class: "quiet" }, "List"), h("label", { class: "option" }, largest, "Largest count first"), h("label", { class: "option" }, summed, "With their sum"))),
    body);
  await load(began.asked, began.trail);
  return box;
}

// Shows another page; the focus stays on the pressed button, or moves to the other one.
function replace(body, shown) {
  const pressed = body.contains(document.activeElement) ? document.activeElement.id : null;
  body.replaceChildren(...shown);
  if (pressed) (body.querySelector(`#${pressed}:enabled`) ?? body.querySelector("button:enabled"))?.focus();
}

// A table of counters with their counts, and a function that updates it from a newer answer.
function counters(namespace, found, asked) {
  const nothing = { update: () => {} };
  if (!found.counters.length) {
    if (asked) return { ...nothing, element: h("p", { class: "empty" }, `No counter’s name begins with “${asked}”.`) };
    return { ...nothing, element: h("p", { class: "empty" }, "No counter here yet. The first add to a name creates it: ", code(`POST /${counterPath(namespace, "likes")}/add`)) };
  }
  const [body, rows] = [h("tbody"), new Map()];
  const sum = h("p", { id: "sum", hidden: !found.sum });
  const update = ({ counts, sum: all }) => {
    keyed(body, rows, counts, (each) => each.counter, (each) => counterRow(namespace, each));
    if (all) sum.replaceChildren("The sum of ", grouped(all.counters), asked ? ` counters that begin with “${asked}”: ` : " counters: ", h("strong", {}, grouped(all.count)));
  };
  update(found);
  const element = table(`Counters of ${namespace}`, ["Counter", { text: "Count", number: true }, { text: "Change/s", number: true }, { text: "Trend", wide: true }], []);
  element.querySelector("tbody").replaceWith(body);
  return { element: h("div", {}, sum, element), update };
}

// Rates are those between two answers, by their instants.
function counterRow(namespace, { counter }) {
  const [perS, count] = [h("td", { class: "number" }, "–"), h("td", { class: "number" })];
  const line = new Sparkline(`Change per second of ${counter}`);
  const row = h("tr", {}, h("th", { scope: "row" }, h("a", { href: ofCounter(namespace, counter) }, counter)), count, perS, h("td", { class: "wide" }, line.element));
  let before = null;
  const update = (now) => {
    const passed = before && (Date.parse(now.as_of) - Date.parse(before.as_of)) / 1000;
    if (before && passed <= 0) return;
    if (before) {
      const change = Number(BigInt(now.count) - BigInt(before.count)) / passed;
      line.push(change);
      perS.textContent = rate(change);
    }
    before = now;
    count.textContent = grouped(now.count);
  };
  return { row, update };
}

function pager(found, trail, load) {
  const back = () => load(trail.slice(0, -1));
  const on = () => load([...trail, found.next_page]);
  if (trail.length === 1 && !found.next_page) return h("span");
  return h("div", { class: "row pager" },
    h("button", { type: "button", id: "page-before", class: "quiet", disabled: trail.length === 1, onclick: back }, "← Before"),
    h("span", { class: "fine" }, `Page ${trail.length}`),
    h("button", { type: "button", id: "page-next", class: "quiet", disabled: !found.next_page, onclick: on }, "Next →"));
}
