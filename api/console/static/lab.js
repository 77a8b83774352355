// The retry lab: the same requests to a counter that counts tokens, and to one that counts requests.
import { counterPath, exchange, get, newToken, Problem } from "./api.js";
import { code, grouped, h, say } from "./dom.js";
import { problemBox } from "./problems.js";

const EXACT = { namespace: "lab", type: "ACCURATE" };
const ROUGH = { namespace: "lab-rough", type: "BEST_EFFORT" };
const TIMES = 10;

export async function labView(place, signal) {
  place.append(
    h("h1", {}, "Retry lab"),
    h("p", { class: "lead" }, "A client that gets no answer must retry, and cannot know whether that is one add or two. Here each add has a ",
      h("strong", {}, "token"), ". Send it as often as you like: it counts once. Each step goes to a counter with tokens, and to a best-effort one without."));
  const { namespaces } = await get("v1/namespaces", signal);
  const missing = [EXACT, ROUGH].filter((of) => !namespaces.some((each) => each.namespace === of.namespace));
  if (missing.length) offer(place, signal, missing);
  else await new Lab(place, signal).begin();
}

// To follow a link changes nothing: the namespaces are created by a button.
function offer(place, signal, missing) {
  const names = missing.map(({ namespace, type }) => `“${namespace}” (${type})`).join(" and ");
  const failure = h("div");
  const make = async () => {
    try {
      await create(missing, signal);
    } catch (error) {
      if (signal.aborted) return;
      if (!(error instanceof Problem)) throw error;
      failure.replaceChildren(problemBox(error.body));
      return;
    }
    window.dispatchEvent(new HashChangeEvent("hashchange"));
  };
  place.append(h("section", { class: "panel" },
    h("p", {}, `It counts in ${missing.length > 1 ? "two namespaces that do" : "a namespace that does"} not exist yet: ${names}.`),
    h("button", { type: "button", id: "make-lab", onclick: make }, "Create"), failure));
}

async function create(missing, signal) {
  for (const { namespace, type } of missing) {
    try {
      await exchange("PUT", `v1/namespaces/${namespace}`, { counter_type: type }, signal);
    } catch (error) {
      if (error instanceof Problem && [403, 404].includes(error.body.status)) {
        error.body = { ...error.body, title: `The lab needs the namespace “${namespace}”`,
          detail: `It does not exist, and the key in use may not create it: ${error.body.detail}.`,
          todo: "Ask someone with an admin key to press the button once, or to create “lab” (ACCURATE) and “lab-rough” (BEST_EFFORT)." };
      }
      throw error;
    }
  }
}

class Lab {
  constructor(place, signal) {
    this.signal = signal;
    this.exact = h("output", { class: "count", id: "exact-count", "aria-live": "off" }, "0");
    this.rough = h("output", { class: "count", id: "rough-count", "aria-live": "off" }, "0");
    this.wanted = h("strong", {}, "0");
    this.sent = h("strong", {}, "0");
    this.log = h("ol", { class: "log", id: "log", reversed: true });
    this.next = h("p", { class: "hint", id: "hint" });
    this.steps = [
      ["send", "Send an add", "An add of 1, with a new token.", () => this.send()],
      ["again", "Send the same request again", "Like a client that got no answer.", () => this.again()],
      ["hedge", `Send one add ${TIMES} times at once`, "Like a client that hedges: with a new token.", () => this.hedge()],
      ["change", "Change the payload", "The first token again, now with 100 instead of 1.", () => this.change()],
      ["restart", "Start over", "With new counters at 0.", () => this.begin()],
    ];
    this.buttons = Object.fromEntries(this.steps.map(([id, name, , act]) => [id, h("button", { type: "button", id: `do-${id}`, "aria-describedby": `about-${id}`, onclick: () => this.run(act), class: id === "restart" ? "quiet" : null }, name)]));
    place.append(
      h("div", { class: "scales" }, this.scale(EXACT, this.exact, "Counts each token once."), this.scale(ROUGH, this.rough, "Counts every request.")),
      h("p", { class: "tally" }, "You wanted ", this.wanted, " adds of 1, and sent ", this.sent, " requests to each counter."),
      h("div", { class: "bench" },
        h("section", { "aria-labelledby": "steps" }, h("h2", { id: "steps" }, "Steps"), this.next,
          h("ul", { class: "steps" }, this.steps.map(([id, , about]) => h("li", {}, this.buttons[id], h("span", { class: "fine", id: `about-${id}` }, about))))),
        h("section", { "aria-labelledby": "answers" }, h("h2", { id: "answers" }, "What was sent, and what came back"), this.log)));
  }

  scale(of, output, about) {
    return h("section", { class: "panel", "aria-label": `${of.type} counter` },
      h("h2", {}, h("span", { class: `badge ${of.type.toLowerCase()}` }, of.type)), output, h("p", { class: "fine" }, about));
  }

  async begin() {
    this.counter = `try-${crypto.getRandomValues(new Uint32Array(1))[0].toString(36)}`;
    this.token = null;
    this.adds = 0;
    this.requests = 0;
    this.log.replaceChildren(h("li", { class: "empty" }, "Nothing yet."));
    this.enable(["send"]);
    this.hint("Begin with an add.");
    await this.weigh();
  }

  // One step: the buttons are disabled meanwhile, and the focus stays.
  async run(act) {
    if (this.busy) return;
    this.busy = true;
    try {
      await act();
    } catch (error) {
      if (this.signal.aborted) return;
      if (!(error instanceof Problem)) throw error;
      this.tally();
      // The case that this page is about: the outcome is unknown.
      const todo = this.token && !error.body.status ? { todo: "When the service answers, send the same request again: it counts once." } : {};
      this.tell("It failed", [problemBox({ ...error.body, ...todo })], false);
    } finally {
      this.busy = false;
    }
  }

  enable(ids) {
    for (const [id, button] of Object.entries(this.buttons)) {
      if (id !== "restart") button.setAttribute("aria-disabled", ids.includes(id) ? "false" : "true");
    }
  }

  allowed(id) {
    return this.buttons[id].getAttribute("aria-disabled") !== "true";
  }

  hint(text) {
    this.next.textContent = text;
  }

  // One request to each of the two counters; a problem is an answer, too.
  async both(delta, token) {
    this.requests += 1;
    const body = { delta, idempotency_token: token };
    const ask = async ({ namespace }) => {
      try {
        return await exchange("POST", `${counterPath(namespace, this.counter)}/add`, body, this.signal);
      } catch (error) {
        if (!(error instanceof Problem) || !error.body.status) throw error;
        return { status: error.body.status, body: error.body };
      }
    };
    const [exact, rough] = await Promise.all([ask(EXACT), ask(ROUGH)]);
    return { body, exact, rough };
  }

  async send() {
    this.token = await newToken(this.signal);
    // Wanted from here on, with or without an answer.
    this.adds += 1;
    this.enable(["send", "again", "hedge", "change"]);
    const sent = await this.both(1, this.token);
    await this.weigh();
    this.tell("Send an add", [request(sent.body), answers(sent)]);
    this.hint("Now send the same request again, as if there had been no answer.");
  }

  async again() {
    if (!this.allowed("again")) return;
    const sent = await this.both(1, this.token);
    await this.weigh();
    this.tell("The same request again", [request(sent.body), answers(sent),
      sent.exact.body.replayed ? h("p", {}, "It existed already: acknowledged and not counted again. The best-effort counter increased.") : null]);
    this.hint("Press it again if you like. Then hedge: one add, ten requests at once.");
  }

  async hedge() {
    if (!this.allowed("hedge")) return;
    const token = await newToken(this.signal);
    this.adds += 1;
    const sent = await Promise.all(Array.from({ length: TIMES }, () => this.both(1, token)));
    await this.weigh();
    const words = sent.map(({ exact }) => outcome(exact));
    const results = [...new Set(words)].map((word) => `${words.filter((each) => each === word).length} ${word}`).join(", ");
    this.tell(`One add, ${TIMES} times at once`, [request(sent[0].body),
      h("p", {}, `ACCURATE: ${results}. BEST_EFFORT: ${sent.filter((each) => each.rough.status === 200).length} counted.`),
      h("p", { class: "chips" }, sent.map((each) => chip(each.exact)))]);
    this.hint("Now use the first token for another payload: that is a client's bug, and it is reported.");
  }

  async change() {
    if (!this.allowed("change")) return;
    const sent = await this.both(100, this.token);
    await this.weigh();
    this.tell("Another payload under the first token", [request(sent.body), answers(sent),
      h("p", {}, "The first payload remains in effect. The best-effort counter counted another add.")]);
    this.hint("That is all: any number of requests with one token is one add.");
  }

  // What each count is now.
  async weigh() {
    const [exact, rough] = await Promise.all([EXACT, ROUGH].map(({ namespace }) => get(counterPath(namespace, this.counter), this.signal)));
    this.exact.textContent = grouped(exact.count);
    this.rough.textContent = grouped(rough.count);
    this.tally();
    this.exact.classList.toggle("right", exact.count === this.adds);
    this.rough.classList.toggle("off", rough.count !== this.adds);
    this.counts = { exact: exact.count, rough: rough.count };
  }

  tally() {
    this.wanted.textContent = this.adds;
    this.sent.textContent = this.requests;
  }

  // A step and the counts after it, if they are *known*.
  tell(title, parts, known = true) {
    this.log.querySelector(".empty")?.remove();
    const { exact, rough } = this.counts;
    const after = known ? `After it: ACCURATE ${exact}, BEST_EFFORT ${rough}.` : "The counts after it are not known.";
    this.log.prepend(h("li", {}, h("h3", {}, title), parts, h("p", { class: "fine after" }, after)));
    say(known ? `${title}: the accurate count is ${exact}, the best-effort one ${rough}.` : title);
  }
}

const request = (body) => h("pre", { tabindex: "0", "aria-label": "Request" }, `POST …/add\n${JSON.stringify(body, null, 1)}`);

// The result in a word. Over several nodes the store does not always report whether an add is a replay.
function outcome({ status, body }) {
  if (status !== 200) return body.code;
  if (body.replayed === true) return "replayed";
  return body.replayed === false || body.retry_safe === false ? "counted" : "acknowledged";
}

function chip(answer) {
  const word = outcome(answer);
  const kind = { counted: "good", replayed: "same", acknowledged: "same" }[word] ?? "bad";
  return h("span", { class: `chip ${kind}` }, `${answer.status} ${word}`);
}

function answers({ exact, rough }) {
  return h("dl", { class: "answers" }, row("ACCURATE", exact), row("BEST_EFFORT", rough));
}

function row(name, answer) {
  const { status, body } = answer;
  const facts = status === 200
    ? `replayed: ${body.replayed}${body.retry_safe === false ? ", retry_safe: false" : ""}`
    : `applied: ${body.applied}, retry: ${body.retry}`;
  return h("div", {}, h("dt", {}, name), h("dd", {}, chip(answer), " ", code(facts), status === 200 ? null : h("p", {}, body.detail)));
}
