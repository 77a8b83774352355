// Charts over time by uPlot, in the page's own colours, with a table of the same numbers.
import { grouped, h, signed, table } from "./dom.js";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const narrow = () => matchMedia("(max-width: 700px)").matches;

function compact(value) {
  const size = Math.abs(value);
  if (size >= 1e15) return value.toExponential(1).replace("e+", "e");
  for (const [least, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= least) return `${+(value / (unit === "k" ? 1e3 : least)).toFixed(1)}${unit}`;
  }
  return String(+value.toFixed(2));
}

const axis = (more) => ({
  size: 34, stroke: colour("--fine"), font: "12px system-ui, sans-serif", gap: 6,
  grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, ...more,
});

// The width of the widest label, in pixels.
const room = (_, labels) => (labels ? 14 + 7 * Math.max(...labels.map((each) => String(each).length)) : 40);

// Counts are integers, so grid lines are, too.
const WHOLE = Array.from({ length: 300 }, (_, place) => [1, 2, 5][place % 3] * 10 ** Math.floor(place / 3));
const CURSOR = { y: false, points: { size: 6 }, drag: { x: false, y: false } };

// A chart in *box*, redrawn when the colours or the width change, until *signal* ends it.
function keep(box, signal, make, height = 260) {
  let plot = null;
  const size = () => ({ width: Math.max(240, box.clientWidth), height });
  const draw = () => {
    plot?.destroy();
    const { options, data } = make();
    plot = new window.uPlot({ ...size(), padding: [8, 28, 0, 0], ...options }, data, box);
    // The caption, the legend and the table describe the chart.
    plot.root.querySelector("canvas").setAttribute("aria-hidden", "true");
  };
  const watch = new ResizeObserver(() => plot?.setSize(size()));
  watch.observe(box);
  window.addEventListener("themed", draw, { signal });
  signal.addEventListener("abort", () => (watch.disconnect(), plot?.destroy(), (plot = null)));
  draw();
  return draw;
}

const clock = (span) => new Intl.DateTimeFormat(undefined, {
  ...(span > 8 * 86400 ? { day: "numeric", month: "short" } : span > 2 * 86400 ? { weekday: "short" } : {}),
  ...(span < 1800 ? { second: "2-digit" } : {}), hour: "2-digit", minute: "2-digit", hourCycle: "h23",
});

// How a rate is told so that its number is no small fraction: a unit and its seconds.
const PER = [["a second", 1], ["a minute", 60], ["an hour", 3600], ["a day", 86400]];
const unitOf = (most) => PER.find(([, s]) => most * s >= 1) ?? PER.at(-1);

// Two charts with one cursor, each on its own axis: bars for the rate in each step, a line for the total. They begin
// where data begin. *stepS* is how long a step is; the last one may be shorter.
export function historyChart(all, span, stepS, signal) {
  const first = all.findIndex((each) => Number(each.count) !== 0 || Number(each.delta) !== 0);
  const points = all.slice(Math.max(0, first - 1));
  const format = clock(span);
  const moments = points.map((each) => Date.parse(each.time) / 1000);
  // The last step is not complete: it is drawn as wide as the others, with its own end time.
  const times = moments.map((at, place) => (place && place === points.length - 1 ? moments[place - 1] + stepS : at));
  const perS = points.map((each, place) => Number(each.delta) / (place ? Math.max(1, moments[place] - moments[place - 1]) : stepS));
  const [unit, s] = unitOf(Math.max(0, ...perS.map(Math.abs)));
  const part = (label, series, data, values) => ({
    data: [times, data],
    options: {
      scales: { y: { range: (_, low, high) => bounds(low, high, label !== "Total") } },
      cursor: { ...CURSOR, sync: { key: "history" } },
      axes: [
        axis({ values: (_, at) => at.map((each) => format.format(each * 1000)), space: narrow() ? 70 : 90 }),
        axis({ size: 64, values: (_, at) => at.map(compact), ...values }),
      ],
      series: [
        { label: "Time", value: (_, at, __, place) => (at == null ? "–" : format.format(moments[place] * 1000)) },
        { label, width: 2, points: { show: false }, ...series },
      ],
    },
  });
  const rate = () => part(`Change ${unit}`, {
    fill: colour("--bar"), stroke: colour("--bar"), width: 0, paths: window.uPlot.paths.bars({ size: [0.8, 24], align: -1 }),
    value: (_, each, __, place) => (each == null ? "–" : `${compact(each)} (${signed(points[place].delta)} in all)`),
  }, perS.map((each) => each * s));
  const total = () => part("Total", {
    stroke: colour("--accent"), value: (_, each, __, place) => (each == null ? "–" : grouped(points[place].count)),
  }, points.map((each) => Number(each.count)), { incrs: WHOLE });
  const rows = points.map((each) => h("tr", {}, h("th", { scope: "row" }, format.format(Date.parse(each.time))),
    h("td", { class: "number" }, signed(each.delta)), h("td", { class: "number" }, grouped(each.count))));
  const sum = points.reduce((found, each) => found + BigInt(each.delta), 0n);
  const boxes = [h("div", { class: "plot" }), h("div", { class: "plot" })];
  const figure = h("figure", {},
    h("figcaption", {}, `Change ${unit}: ${signed(sum)} in all.`), boxes[0],
    h("figcaption", {}, `Total: ${grouped(points.at(-1).count)} at the end.`), boxes[1],
    h("details", {}, h("summary", {}, "The same as a table"), table("History", ["Until", { text: "Change", number: true }, { text: "Total", number: true }], rows.reverse())));
  requestAnimationFrame(() => signal.aborted || [rate, total].forEach((make, place) => keep(boxes[place], signal, make, 170)));
  return figure;
}

// From 0 if requested or close; with some space above and below.
function bounds(low, high, fromZero) {
  const near = fromZero || (low >= 0 && low < high / 2) || (high <= 0 && high > low / 2);
  const [least, most] = near ? [Math.min(0, low ?? 0), Math.max(0, high ?? 0)] : [low ?? 0, high ?? 0];
  const pad = (most - least) * 0.08 || 1;
  return [near && least === 0 ? 0 : least - pad, near && most === 0 && least < 0 ? 0 : most + pad];
}

// Lines of rates, of samples that grow while the page is open: give it the function that yields the data.
export function ratesChart(series, samples, signal, height) {
  const box = h("div", { class: "plot" });
  const format = clock(600);
  const make = () => ({
    data: samples(),
    options: {
      scales: { y: { range: (_, __, high) => [0, Math.max(1, (high ?? 0) * 1.1)] } },
      cursor: CURSOR,
      axes: [
        axis({ values: (_, at) => at.map((each) => format.format(each * 1000)), space: narrow() ? 80 : 100, incrs: [1, 5, 10, 30, 60, 120, 300] }),
        axis({ size: room, values: (_, at) => at.map(compact) }),
      ],
      series: [
        { label: "Time", value: (_, at) => (at == null ? "–" : format.format(at * 1000)) },
        ...series.map((each) => ({ label: each.label, stroke: colour(each.colour), width: 2, dash: each.dash, points: { show: false },
          value: (_, rate) => (rate == null ? "–" : `${compact(rate)}/s`) })),
      ],
    },
  });
  let draw = () => {};
  requestAnimationFrame(() => signal.aborted || (draw = keep(box, signal, make, height)));
  return { box, draw: () => draw() };
}
