// Lists that stay up to date: requests that repeat while the page is visible, rows that keep the focus, sparklines.
import { isFinal, Problem } from "./api.js";
import { h, rate, time } from "./dom.js";

const SAMPLES = 24;
const BACKOFF_MAX = 6;

// Calls *start* when the page is visible, now or later, with a signal that ends when it is hidden.
export function whileVisible(start, signal) {
  let shown = new AbortController();
  const look = () => {
    shown.abort();
    if (document.hidden) return;
    shown = new AbortController();
    start(AbortSignal.any([signal, shown.signal]));
  };
  document.addEventListener("visibilitychange", look, { signal });
  look();
}

// Repeats *work* while the page is visible, one call at a time: *ms* after the end of the last one, or after the time that
// it returned; if it returned null, not until the function that this returns is called with a time.
export function repeat(work, ms, signal, first = ms) {
  let [timer, wait, running] = [0, first, false];
  const plan = (next = ms) => {
    wait = next;
    clearTimeout(timer);
    if (wait !== null && !running && !document.hidden && !signal.aborted) timer = setTimeout(run, wait);
  };
  const run = async () => {
    running = true;
    let next = ms;
    try {
      next = await work();
    } finally {
      running = false;
      plan(next);
    }
  };
  // What the page shows is old when it becomes visible.
  document.addEventListener("visibilitychange", () => plan(wait === null ? null : 0), { signal });
  signal.addEventListener("abort", () => clearTimeout(timer));
  plan(first);
  return plan;
}

// Repeats *work*, later and later while it fails. Returns a line that says how fresh the content is, with a button that
// pauses it.
export function live(work, ms, signal) {
  const state = h("span", { class: "state on" }, "Updated ", time(new Date().toISOString()));
  const button = h("button", { type: "button", class: "quiet small", onclick: () => toggle() }, "Pause");
  let [paused, failures] = [false, 0];
  const tell = (kind, ...parts) => {
    state.className = `state ${kind}`;
    state.replaceChildren(...parts);
  };
  const plan = repeat(async () => {
    try {
      await work();
      failures = 0;
      if (!paused) tell("on", "Updated ", time(new Date().toISOString()));
    } catch (error) {
      if (signal.aborted) return null;
      if (!(error instanceof Problem)) throw error;
      if (isFinal(error.body)) return stop(error.body.title);
      failures += 1;
      tell("off", `${error.body.title}; this is the last known state. Trying again.`);
    }
    return paused ? null : ms * Math.min(2 ** failures, BACKOFF_MAX);
  }, ms, signal);
  const stop = (why) => {
    paused = true;
    button.textContent = "Resume";
    plan(null);
    tell(why === "Paused" ? "" : "off", why);
    return null;
  };
  const toggle = () => {
    if (!paused) return stop("Paused");
    paused = false;
    button.textContent = "Pause";
    plan(0);
  };
  return h("div", { class: "row fresh" }, state, button);
}

// Shows *items* as rows of *body*, by their keys, after the *before* others in it: *make* returns a row, and a function that
// updates it. Rows are kept, and their order too while one of them has the focus or the pointer.
export function keyed(body, rows, items, keyOf, make, before = 0) {
  const held = body.contains(document.activeElement) || body.matches(":hover");
  const keys = new Set(items.map(keyOf));
  for (const [key, { row }] of rows) {
    if (keys.has(key) || (held && row.contains(document.activeElement))) continue;
    row.remove();
    rows.delete(key);
  }
  items.forEach((item, number) => {
    const [key, place] = [keyOf(item), number + before];
    const isNew = !rows.has(key);
    if (isNew) rows.set(key, make(item));
    const { row, update } = rows.get(key);
    update(item);
    if (isNew || (!held && body.children[place] !== row)) body.insertBefore(row, body.children[place] ?? null);
  });
}

// The page has an icon of this kind.
const SVG = document.querySelector("svg").namespaceURI;
const [WIDTH, HEIGHT] = [96, 24];

// A line of the latest rates, with the same in words for who does not see it.
export class Sparkline {
  constructor(what) {
    this.what = what;
    this.values = [];
    this.element = document.createElementNS(SVG, "svg");
    this.area = document.createElementNS(SVG, "path");
    this.line = document.createElementNS(SVG, "path");
    this.base = document.createElementNS(SVG, "path");
    this.base.setAttribute("class", "base");
    this.base.setAttribute("d", `M1 ${HEIGHT - 1.5}H${WIDTH - 1}`);
    this.element.append(this.base, this.area, this.line);
    const facts = { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, width: WIDTH, height: HEIGHT, role: "img", preserveAspectRatio: "none" };
    for (const [name, value] of Object.entries(facts)) this.element.setAttribute(name, value);
    this.area.setAttribute("class", "area");
    this.draw();
  }

  push(value) {
    this.values.push(value);
    if (this.values.length > SAMPLES) this.values.shift();
    this.draw();
  }

  draw() {
    const { values } = this;
    const [low, high] = [Math.min(0, ...values), Math.max(0, ...values)];
    const span = high - low || 1;
    const y = (value) => (HEIGHT - 2 - ((value - low) / span) * (HEIGHT - 4)).toFixed(1);
    const x = (place) => (WIDTH - 1 - (values.length - 1 - place) * ((WIDTH - 2) / (SAMPLES - 1))).toFixed(1);
    const points = values.map((value, place) => `${x(place)} ${y(value)}`).join("L");
    this.line.setAttribute("d", values.length > 1 ? `M${points}` : "");
    this.area.setAttribute("d", values.length > 1 ? `M${x(0)} ${y(0)}L${points}L${x(values.length - 1)} ${y(0)}Z` : "");
    this.element.setAttribute("aria-label", values.length
      ? `${this.what}: now ${rate(values.at(-1))}, from ${rate(low)} to ${rate(high)} while this page is open`
      : `${this.what}: not known yet`);
  }
}
