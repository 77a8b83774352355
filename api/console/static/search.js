// Search in the names of all counters: the form at the top, which "/" focuses, and the page of what it finds.
import { get, Problem } from "./api.js";
import { h, ofCounter, ofNamespace, say, table } from "./dom.js";
import { problemBox } from "./problems.js";

const LIMIT = 50;

export function searchForm() {
  const input = document.getElementById("search");
  document.getElementById("search-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (input.value.trim()) location.hash = `#/search/${encodeURIComponent(input.value.trim())}`;
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea") || document.querySelector("dialog[open]")) return;
    event.preventDefault();
    input.focus();
    input.select();
  });
}

export async function searchView(place, signal, text) {
  document.getElementById("search").value = text;
  const { namespaces } = await get("v1/namespaces", signal);
  const spaces = namespaces.filter((each) => each.namespace.includes(text.toLowerCase())).slice(0, LIMIT);
  const body = h("tbody");
  const list = table("Counters", ["Counter", "Namespace"], []);
  list.querySelector("tbody").replaceWith(body);
  const about = h("p", { class: "fine", id: "found-counters" });
  const on = h("button", { type: "button", class: "quiet", id: "search-on", onclick: () => load() }, "Search on");
  const trouble = h("div");
  let page = null;
  const load = async () => {
    on.disabled = true;
    const query = new URLSearchParams({ q: text, limit: LIMIT, ...(page ? { page } : {}) });
    try {
      const found = await get(`v1/search?${query}`, signal);
      page = found.next_page;
      body.append(...found.found.map(({ namespace, counter }) => h("tr", {},
        h("th", { scope: "row" }, h("a", { href: ofCounter(namespace, counter) }, counter)),
        h("td", {}, h("a", { class: "plain", href: ofNamespace(namespace) }, namespace)))));
      trouble.replaceChildren();
    } catch (error) {
      if (signal.aborted || !(error instanceof Problem)) throw error;
      trouble.replaceChildren(problemBox(error.body, load));
    }
    on.disabled = false;
    on.hidden = page === null;
    list.hidden = !body.children.length;
    const number = body.children.length;
    about.textContent = `${number || "No"} counter${number === 1 ? "" : "s"} with “${text}” in the name${page ? " so far" : ""}`;
    say(about.textContent);
  };
  place.append(h("h1", {}, "Search"), about, list, trouble, on);
  if (spaces.length) place.append(h("section", {}, h("h2", {}, "Namespaces"), h("ul", { class: "row plain" }, spaces.map((each) => h("li", {}, h("a", { href: ofNamespace(each.namespace) }, each.namespace))))));
  await load();
}
