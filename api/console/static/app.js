// The page: which view is shown, the key, and light or dark.
import { hasKey, onRefused, Problem, setKey } from "./api.js";
import { h, say } from "./dom.js";
import { problemBox } from "./problems.js";
import { counterView } from "./counter.js";
import { healthView } from "./health.js";
import { keysView } from "./keys.js";
import { homeView } from "./home.js";
import { labView } from "./lab.js";
import { namespaceView } from "./namespaces.js";
import { searchForm, searchView } from "./search.js";

const main = document.getElementById("main");
let ending = new AbortController(); // Ends the work of the current view.
let shown = 0;

const ROUTES = [
  [/^#\/$/, "counters", "Counters", homeView],
  [/^#\/health$/, "health", "Health", healthView],
  [/^#\/keys$/, "keys", "API keys", keysView],
  [/^#\/lab$/, "lab", "Retry lab", labView],
  [/^#\/search\/([^/]+)$/, "counters", "Search: $1", searchView],
  [/^#\/ns\/([^/]+)$/, "counters", "$1", namespaceView],
  [/^#\/ns\/([^/]+)\/c\/([^/]+)$/, "counters", "$2", counterView],
];

async function show({ focus = true } = {}) {
  const hash = location.hash || "#/";
  const route = ROUTES.find(([pattern]) => pattern.test(hash));
  ending.abort();
  ending = new AbortController();
  const { signal } = ending;
  const turn = ++shown;
  const place = h("div", { class: "view" });
  main.replaceChildren(place);
  document.getElementById("search").value = "";
  for (const each of document.querySelectorAll("[data-nav]")) {
    if (route && each.dataset.nav === route[1]) each.setAttribute("aria-current", "page");
    else each.removeAttribute("aria-current");
  }
  const names = route && namesIn(hash.match(route[0]).slice(1));
  if (!names) {
    document.title = "Counter console";
    place.append(h("h1", {}, "There is nothing here"), h("p", {}, h("a", { href: "#/" }, "All namespaces")));
    return;
  }
  const title = route[2].replace(/\$(\d)$/, (_, place) => names[place - 1]);
  document.title = `${title} · Counter console`;
  try {
    await route[3](place, signal, ...names);
  } catch (error) {
    if (signal.aborted) return;
    if (!(error instanceof Problem)) throw error;
    if (!place.querySelector("h1")) place.append(h("h1", {}, title));
    place.append(problemBox(error.body, () => show()));
  }
  if (focus && turn === shown && document.activeElement === document.body) main.focus({ preventScroll: true });
}

// The decoded part of an address, or null if it is malformed.
function namesIn(parts) {
  try {
    return parts.map(decodeURIComponent);
  } catch {
    return null;
  }
}

function themes() {
  const button = document.getElementById("theme");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null; // In memory only.
  const isDark = () => (chosen === null ? dark.matches : chosen === "dark");
  const paint = () => {
    document.documentElement.classList.toggle("dark", isDark());
    document.documentElement.classList.toggle("light", !isDark());
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Change to ${isDark() ? "light" : "dark"} colours`);
    window.dispatchEvent(new Event("themed"));
  };
  button.addEventListener("click", () => {
    chosen = isDark() ? "light" : "dark";
    paint();
  });
  dark.addEventListener("change", paint);
  paint();
}

function keys() {
  const [dialog, form, input, wrong] = ["ask", "ask-form", "ask-key", "ask-wrong"].map((id) => document.getElementById(id));
  const ask = (why) => {
    wrong.textContent = why ?? "";
    document.getElementById("ask-forget").hidden = !hasKey();
    if (!dialog.open) dialog.showModal();
  };
  const keep = document.getElementById("ask-keep");
  const paint = () => (document.getElementById("key").textContent = hasKey() ? "API key ✓" : "API key");
  const use = (text) => {
    setKey(text, keep.checked);
    input.value = "";
    if (!text) keep.checked = false;
    dialog.close();
    say(text ? "The key is in use." : "You are signed out: the key is forgotten.");
    paint();
    show();
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = input.value.trim();
    if (!text) wrong.textContent = "Enter a key; it begins with ck_.";
    // No browser sends other characters in a header.
    else if (!/^[\x21-\x7e]+$/.test(text)) wrong.textContent = "This is not a key: it has spaces or characters that keys never have. Copy the whole key again.";
    else use(text);
  });
  document.getElementById("key").addEventListener("click", () => ask());
  document.getElementById("ask-close").addEventListener("click", () => dialog.close());
  document.getElementById("ask-forget").addEventListener("click", () => use(null));
  paint();
  onRefused((problem) => ask(`${problem.title}. ${hasKey() ? "The current key was rejected." : "This service requires one."}`));
}

document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
window.addEventListener("hashchange", () => show());
themes();
keys();
searchForm();
show({ focus: false });
