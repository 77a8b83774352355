// All namespaces; and one, with its settings, its counters and its rollup.
import { counterPath, exchange, get, Problem } from "./api.js";
import { code, grouped, h, say, table, time } from "./dom.js";
import { shardsPart } from "./health.js";
import { problemBox } from "./problems.js";

const PAGE = 50;
const FEW = 12; // So few need no search.
const ABOUT = {
  ACCURATE: "Every read is exact.",
  EVENTUAL: "Counts are exact, and may be a few seconds old.",
  BEST_EFFORT: "Fast and inexact: retries count twice, and the cache may lose it.",
};

const ofNamespace = (name) => `#/ns/${encodeURIComponent(name)}`;
const ofCounter = (namespace, counter) => `${ofNamespace(namespace)}/c/${encodeURIComponent(counter)}`;
const badge = (type) => h("span", { class: `badge ${type.toLowerCase()}`, title: ABOUT[type] }, type);

export async function namespacesView(place, signal) {
  const { namespaces } = await get("v1/namespaces", signal);
  place.append(
    h("h1", {}, "Namespaces"),
    h("p", { class: "lead" }, "A namespace is a set of counters with common settings. ",
      h("a", { href: "#/lab" }, "New here? The retry lab shows in a minute what this service is for.")),
    namespaces.length
      ? choice(namespaces)
      : h("p", { class: "empty" }, "There is no namespace that you can see. Create one with ", code("PUT /v1/namespaces/{name}"), "."));
}

// One answer contains all of them, so they are filtered and paged here.
function choice(namespaces) {
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

function card(each) {
  return h("li", {},
    h("a", { class: "card", href: ofNamespace(each.namespace) },
      h("strong", {}, each.namespace), badge(each.counter_type),
      h("span", { class: "fine" }, ABOUT[each.counter_type])));
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
      : await listing(name, signal),
    h("section", {}, h("h2", {}, "Settings"), settings(found)));
  if (!rough) place.append(await shardsPart(name, signal));
}

function settings(found) {
  const { namespace, created_at, ...rest } = found;
  const rows = [["created", time(created_at)], ...Object.entries(rest).map(([name, value]) => [name, value === 0 ? "any number" : String(value)])];
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
  // The prefix and the pages that led here, this one last, kept for a return to this view.
  const began = history.state?.listing ?? { asked: "", trail: [null] };
  prefix.value = began.asked;
  let turn = 0; // Only the answer to the latest request is shown.
  const load = async (asked, trail) => {
    const mine = ++turn;
    const query = new URLSearchParams({ limit: PAGE });
    if (asked) query.set("prefix", asked);
    if (trail.at(-1)) query.set("page", trail.at(-1));
    let shown;
    try {
      const found = await get(`v1/namespaces/${namespace}/counters?${query}`, signal);
      shown = [await counters(namespace, found, asked, signal), pager(found, trail, (to) => load(asked, to))];
      if (mine !== turn) return;
      history.replaceState({ listing: { asked, trail } }, "");
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
  box.append(
    h("h2", { id: "counters" }, "Counters"),
    h("form", { class: "filter", onsubmit: filter }, h("label", { for: "prefix" }, "Names that begin with"),
      h("div", { class: "row" }, prefix, h("button", { type: "submit", class: "quiet" }, "List"))),
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

async function counters(namespace, found, asked, signal) {
  if (!found.counters.length) {
    if (asked) return h("p", { class: "empty" }, `No counter’s name begins with “${asked}”.`);
    return h("p", { class: "empty" }, "No counter here yet. The first add to a name creates it: ", code(`POST /${counterPath(namespace, "likes")}/add`));
  }
  let counts = [];
  try {
    const answer = await fetchCounts(namespace, found.counters, signal);
    counts = answer.results;
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
  }
  const rows = found.counters.map((name, place) =>
    h("tr", {}, h("th", { scope: "row" }, h("a", { href: ofCounter(namespace, name) }, name)),
      h("td", { class: "number" }, counts[place]?.count === undefined ? "–" : grouped(counts[place].count))));
  return table(`Counters of ${namespace}`, ["Counter", { text: "Count", number: true }], rows);
}

async function fetchCounts(namespace, names, signal) {
  return (await exchange("POST", `v1/namespaces/${namespace}/batch/get`, { counters: names }, signal)).body;
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
