// Making elements, and writing numbers and times.

// h("p", {class: "note"}, "text", child): text is always text, never markup.
export function h(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((each) => each != null && each !== false));
  return made;
}

// Counts may be larger than a number can be: they stay text from the answer to the screen.
export function grouped(count) {
  return String(count).replace(/^-/, "\u2212").replace(/\B(?=(\d{3})+$)/g, "\u202f");
}

export const signed = (delta) => (/^(-|0$)/.test(String(delta)) ? grouped(delta) : `+${grouped(delta)}`);

export function seconds(value) {
  const s = Math.max(0, value);
  if (s < 1) return `${Math.round(s * 1000)} ms`;
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 120) return `${Math.round(s)} s`;
  if (s < 7200) return `${Math.round(s / 60)} min`;
  return s < 172800 ? `${Math.round(s / 3600)} h` : `${Math.round(s / 86400)} days`;
}

const CLOCK = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const DAY = new Intl.DateTimeFormat(undefined, { year: "numeric", month: "short", day: "numeric" });

// An RFC 3339 instant as people read it, with all of it where they point at it.
export function time(instant) {
  const moment = new Date(instant);
  const far = Math.abs(Date.now() - moment) > 20 * 3600 * 1000;
  const text = (far ? `${DAY.format(moment)}, ` : "") + CLOCK.format(moment);
  return h("time", { datetime: instant, title: instant }, text);
}

// A rate, without its unit.
export function rate(value) {
  const size = Math.abs(value);
  if (size < 0.005) return "0";
  const text = size < 0.1 ? size.toFixed(2) : size < 100 ? size.toFixed(1) : grouped(Math.round(size));
  return (value < 0 ? "\u2212" : "") + text;
}

// How long ago an instant was, kept up to date, with all of it where they point at it.
export function age(instant) {
  const made = h("time", { datetime: instant, title: instant, class: "age" });
  tellAge(made);
  return made;
}

function tellAge(element) {
  const s = (Date.now() - Date.parse(element.dateTime)) / 1000;
  const text = s < -5 ? `in ${seconds(-s)}` : s < 5 ? "just now" : `${s < 60 ? `${Math.round(s)} s` : seconds(s)} ago`;
  if (element.textContent !== text) element.textContent = text;
}

setInterval(() => document.hidden || document.querySelectorAll("time.age").forEach(tellAge), 5000);

// A modal dialog with a form: *submit* is called with the form, and its Problem is shown. *dismiss* closes it.
export function dialog(title, parts, action, submit, dismiss = "Cancel") {
  const wrong = h("p", { class: "wrong", role: "alert" });
  const button = h("button", { type: "submit" }, action);
  const form = h("form", { method: "dialog" }, h("h2", { id: "dialog-title" }, title), parts.flat(3), wrong,
    h("div", { class: "row" }, button, h("button", { type: "button", class: "quiet", onclick: () => box.close() }, dismiss)));
  const box = h("dialog", { "aria-labelledby": "dialog-title" }, form);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (button.disabled) return;
    button.disabled = true;
    wrong.textContent = "";
    try {
      await submit(form, box);
    } catch (error) {
      if (!error.body) throw error;
      const { title, detail, retry_after } = error.body;
      wrong.textContent = `${title}: ${detail}${retry_after ? `. Wait ${retry_after} s first` : ""}`;
    } finally {
      button.disabled = false;
    }
  });
  form.addEventListener("input", () => { wrong.textContent = ""; });
  const opener = document.activeElement;
  box.addEventListener("close", () => {
    box.remove();
    if (opener?.isConnected) opener.focus();
    else document.getElementById("main").focus({ preventScroll: true });
  });
  document.getElementById("main").append(box);
  box.showModal();
  return { box, form, button, wrong };
}

// A dialog for an act that cannot be undone: *act* is called once *wanted* is typed.
export function confirmation(title, parts, what, wanted, verb, act, dismiss) {
  const typed = h("input", { id: "confirm", type: "text", autocomplete: "off", spellcheck: "false", required: true });
  const made = dialog(title, [parts, h("label", { for: "confirm" }, `Type the ${what} to confirm: `, code(wanted)), typed], verb, async (_, box) => {
    if (typed.value.trim() !== wanted.trim()) return void (made.wrong.textContent = `That is not ${wanted}.`);
    await act();
    box.close();
    document.getElementById("main").focus({ preventScroll: true });
  }, dismiss);
  made.button.classList.add("danger");
}

// Radio buttons, each [value, text]; the first is chosen.
export function choices(legend, name, options) {
  return h("fieldset", {}, h("legend", {}, legend), options.map(([value, about], place) =>
    h("label", { class: "option" }, h("input", { type: "radio", name, value, checked: place === 0 }), h("span", {}, h("strong", {}, value), " ", h("span", { class: "fine" }, about)))));
}

const UNITS = { us: 1, ms: 1e3, s: 1e6, m: 60e6, h: 3600e6, d: 86400e6 };

// "1h30m" in microseconds.
export function micros(duration) {
  let sum = 0;
  for (const [, number, unit] of duration.matchAll(/(\d+)(us|ms|s|m|h|d)/g)) sum += number * UNITS[unit];
  return sum;
}

// What changed, for who does not see it; the last of several within a few seconds is enough.
let saying = 0;
export function say(text, wait = 0) {
  clearTimeout(saying);
  saying = setTimeout(() => (document.getElementById("said").textContent = text), wait);
}

// Makes a table that scrolls by itself where it is wider than the page.
export function table(caption, heads, rows, options = {}) {
  return h("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": caption },
    h("table", { class: options.class },
      h("caption", { class: "unseen" }, caption),
      h("thead", {}, h("tr", {}, heads.map((each) => h("th", { scope: "col", class: each.number ? "number" : each.wide ? "wide" : null }, each.text ?? each)))),
      h("tbody", {}, rows)));
}

export const code = (text) => h("code", {}, text);

// The pages of the console.
export const ofNamespace = (name) => `#/ns/${encodeURIComponent(name)}`;
export const ofCounter = (namespace, counter) => `${ofNamespace(namespace)}/c/${encodeURIComponent(counter)}`;
