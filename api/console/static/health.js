// Health of the service: outcomes of adds while this page is open, and the progress of the rollup.
import { get, isFinal, Problem } from "./api.js";
import { ratesChart } from "./chart.js";
import { grouped, h, ofNamespace, rate, seconds, table, time } from "./dom.js";
import { keyed, live, repeat } from "./live.js";
import { problemBox } from "./problems.js";

const EVERY_MS = 2000;
const SAMPLES = 300;
const LINES = [
  { label: "Originals", colour: "--accent", of: ["original"] },
  { label: "Duplicates", colour: "--second", dash: [6, 4], of: ["replayed"] },
  { label: "Conflicts", colour: "--bad", dash: [2, 3], of: ["conflict"] },
  { label: "Late, resolved", colour: "--late", dash: [10, 3, 2, 3], of: ["late_applied", "voided"] },
  { label: "Bound reached", colour: "--text", dash: [1, 4], of: ["bound_reached"] },
];
const ABOUT = {
  original: "counted, for the first time",
  replayed: "replays: acknowledged and not counted again",
  unverified: "counted once; the store does not report whether before",
  conflict: "a token used with another payload: rejected",
  late_applied: "late tokens whose adds are counted",
  voided: "late tokens that will never count",
  cancelled: "adds whose token was cancelled: they count nothing",
  bound_reached: "rejected because of a bound: they count nothing",
  best_effort: "adds to best-effort counters, including retries",
  refused: "rejected before anything was written",
  unknown: "unknown outcome: a retry with the same token finds out",
};

export async function healthView(place, signal) {
  const outcomes = h("div");
  place.append(h("h1", {}, "Health"), outcomes);
  try {
    outcomes.append(await outcomesPart(signal));
  } catch (error) {
    if (signal.aborted || !(error instanceof Problem)) throw error;
    outcomes.append(h("section", {}, h("h2", {}, "Outcomes of adds"), problemBox(error.body)));
  }
  place.append(await rollupPart(signal));
}

// The rollup of each namespace, the worst first, with its shards folded.
async function rollupPart(signal) {
  const list = table("Rollup of the namespaces", ["Namespace", "State", { text: "Overdue", number: true }, { text: "Lag", number: true }, { text: "Adds/s", number: true, wide: true }, { text: "Shards", number: true }], []);
  const [body, rows] = [list.querySelector("table"), new Map()];
  body.querySelector("tbody").remove();
  const more = h("p", { class: "fine" });
  const load = async () => {
    const { namespaces, totals } = await get("v1/overview", signal); // The worst first.
    keyed(body, rows, namespaces, (each) => each.namespace, (each) => rollupRows(each, signal), 2);
    more.textContent = totals.namespaces > namespaces.length ? `The ${namespaces.length} worst of ${totals.namespaces} namespaces.` : "";
  };
  await load();
  return h("section", { "aria-labelledby": "rollup" }, h("div", { class: "row between" }, h("h2", { id: "rollup" }, "Rollup"), live(load, 5000, signal)), list, more);
}

function rollupRows({ namespace }, signal) {
  const [state, overdue, lag, perS] = [h("span"), ...["", "", "wide"].map((kind) => h("td", { class: `number ${kind}` }))];
  const button = h("button", { type: "button", class: "quiet small", "aria-expanded": "false", "aria-label": `Shards of ${namespace}` });
  const inner = h("td", { colspan: "6" });
  const folded = h("tr", { hidden: true }, inner);
  let open = new AbortController();
  button.addEventListener("click", async () => {
    folded.hidden = !folded.hidden;
    button.setAttribute("aria-expanded", String(!folded.hidden));
    open.abort();
    if (folded.hidden) return;
    open = new AbortController();
    inner.replaceChildren(await shardsPart(namespace, AbortSignal.any([signal, open.signal])));
  });
  const row = h("tbody", {},
    h("tr", {}, h("th", { scope: "row" }, h("a", { href: ofNamespace(namespace) }, namespace)), h("td", {}, state), overdue, lag, perS, h("td", { class: "number" }, button)), folded);
  const update = (now) => {
    const [isLate, isAlone] = [now.overdue_seconds > 5, now.unowned > 0];
    state.className = `state ${isLate || isAlone ? "off" : "on"}`;
    state.textContent = isLate ? "Overdue" : isAlone ? `${now.unowned} without a worker` : "On time";
    overdue.textContent = now.overdue_seconds < 0.001 ? "none" : seconds(now.overdue_seconds);
    lag.textContent = seconds(now.lag_seconds);
    perS.textContent = now.adds_per_s === null ? "–" : rate(now.adds_per_s);
    button.textContent = now.shards;
  };
  return { row, update };
}

async function outcomesPart(signal) {
  const samples = [];
  const [sums, none] = [h("dl", { class: "settings sums" }), h("dl", { class: "settings sums" })];
  const tile = ([name, count]) => h("div", {}, h("dt", {}, name.replace("_", " ")), h("dd", {}, h("strong", {}, grouped(count))), h("dd", { class: "fine" }, ABOUT[name] ?? ""));
  const folded = h("summary");
  const take = async () => {
    const found = await get("v1/outcomes", signal);
    samples.push({ at: Date.parse(found.as_of) / 1000, ...found.outcomes });
    if (samples.length > SAMPLES) samples.shift();
    const [some, others] = [[], []];
    for (const each of Object.entries(found.outcomes)) (each[1] ? some : others).push(each);
    sums.replaceChildren(...some.map(tile));
    none.replaceChildren(...others.map(tile));
    folded.textContent = `${others.length} outcomes that did not happen`;
  };
  await take();
  const plot = h("div", {}, h("p", { class: "empty" }, "The first rates come in a moment."));
  const trouble = h("div");
  let chart = null;
  const look = async () => {
    try {
      await take();
      trouble.replaceChildren();
      // One rate alone makes no line.
      if (signal.aborted || samples.length < 3) return;
      if (chart) return chart.draw();
      chart = ratesChart(LINES, () => rates(samples), signal);
      plot.replaceChildren(chart.box);
    } catch (error) {
      if (signal.aborted) return;
      if (!(error instanceof Problem)) throw error;
      trouble.replaceChildren(problemBox(error.body));
      if (isFinal(error.body)) return null;
    }
  };
  repeat(look, EVERY_MS, signal, EVERY_MS / 4);
  return h("section", { "aria-labelledby": "outcomes" },
    h("h2", { id: "outcomes" }, "Outcomes of adds"),
    h("figure", {}, h("figcaption", {}, "Adds and clears a second, sampled by this page every two seconds while it is visible, ten minutes at most."), plot),
    trouble,
    h("h3", {}, "Since the process began"), sums, h("details", {}, folded, none));
}

// Rates between each two samples, a row for each line; a restart begins at 0.
function rates(samples) {
  const pairs = samples.slice(1).map((each, place) => [samples[place], each]);
  const sum = (sample, line) => line.of.reduce((total, name) => total + sample[name], 0);
  return [pairs.map(([, b]) => b.at),
    ...LINES.map((line) => pairs.map(([a, b]) => Math.max(0, sum(b, line) - sum(a, line)) / Math.max(0.001, b.at - a.at)))];
}

export async function shardsPart(namespace, signal) {
  const box = h("div");
  const old = h("p", { class: "warn", hidden: true }, "No answer now; this is the last known state.");
  let plan;
  const load = async () => {
    try {
      const found = await get(`v1/namespaces/${encodeURIComponent(namespace)}/shards`, signal);
      old.hidden = true;
      box.replaceChildren(summary(found.shards), shardsTable(namespace, found.shards));
    } catch (error) {
      if (signal.aborted) return;
      if (!(error instanceof Problem)) throw error;
      old.hidden = !(error.body.code === "no_answer" && box.querySelector("table"));
      if (old.hidden) box.replaceChildren(problemBox(error.body, () => load().then(plan)));
      if (isFinal(error.body)) return null;
    }
  };
  plan = repeat(async () => (box.contains(document.activeElement) ? undefined : load()), 5000, signal, await load());
  return h("section", {}, h("h2", {}, "Rollup of ", h("span", { class: "name" }, namespace)), old, box);
}

function summary(shards) {
  const most = Math.max(...shards.map((each) => each.overdue_seconds));
  const alone = shards.filter((each) => each.owner === null).length;
  const text = [most < 5 ? "The rollup is on time." : `The worst shard is ${seconds(most)} overdue.`];
  if (alone) text.push(`${alone} of ${shards.length} shards have no owner now: counts stay correct, but reads of them become slower.`);
  return h("p", { class: most > 30 || alone ? "warn" : "fine" }, text.join(" "));
}

function shardsTable(namespace, shards) {
  const rows = shards.map((each) => h("tr", {},
    h("th", { scope: "row" }, each.shard),
    h("td", {}, time(each.watermark)),
    h("td", { class: "number" }, seconds(each.lag_seconds)),
    h("td", { class: "number" }, each.overdue_seconds < 0.001 ? "none" : seconds(each.overdue_seconds)),
    h("td", {}, each.owner === null ? h("em", {}, "none") : h("code", {}, each.owner))));
  return table(`Shards of ${namespace}`, ["Shard", "Rolled up to", { text: "Lag", number: true }, { text: "Overdue", number: true }, "Owner"], rows);
}
