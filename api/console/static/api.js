// Requests to the service. Paths are relative, so that the page works behind a proxy with a path prefix.

// In memory; in the session storage of the tab only if asked; never in a URL.
const KEPT = "counter.key";
let key = kept();
let whenRefused = () => {};
let aheadMs = 0; // How far the service's clock is ahead of this one.

export const hasKey = () => key !== null;
export const keyId = () => key?.split("_")[1] ?? null;

export function setKey(text, keep = false) {
  key = text || null;
  try {
    if (key && keep) sessionStorage.setItem(KEPT, key);
    else sessionStorage.removeItem(KEPT);
  } catch {
    // The browser allows no storage: it stays in memory.
  }
}

function kept() {
  try {
    return sessionStorage.getItem(KEPT);
  } catch {
    return null;
  }
}

export const onRefused = (act) => (whenRefused = act);
export const now = () => Date.now() + aheadMs;
export const noteClock = (instant) => (aheadMs = Date.parse(instant) - Date.now());

export class Problem extends Error {
  constructor(body) {
    super(body.title);
    this.body = body;
  }
}

// Whether the same request would be rejected again.
export const isFinal = ({ status }) => status >= 400 && status < 500 && status !== 429;

const NO_ANSWER = {
  code: "no_answer", title: "The service does not answer", status: 0, retry: "same_token", applied: null,
  detail: "There was no answer: the process may have ended, or the network may be down.",
};

// For example a page or an error of a proxy.
const foreign = (status) => ({
  ...NO_ANSWER, status, title: `HTTP ${status}`,
  detail: "The answer is not the service's; a proxy in between may have made it.",
  todo: "Check what is between here and the service, then try again.",
});

// Numbers past 2^53 would lose digits: they become text.
export function parse(text) {
  return JSON.parse(text.replace(/"(count|delta|at_least|at_most|amount|held|held_down|settled)":\s*(-?\d{16,})/g, '"$1":"$2"'));
}

export const counterPath = (namespace, counter) =>
  `v1/namespaces/${namespace}/counters/${encodeURIComponent(counter).replaceAll(".", "%2E")}`;

const headers = () => (key === null ? {} : { Authorization: `Bearer ${key}` });

async function problemOf(answer) {
  const found = await answer.json().catch(() => null);
  const body = typeof found?.code === "string" ? found : foreign(answer.status);
  if (answer.status === 401) {
    if (body.code === "key_invalid") setKey(key); // It is not kept for the next load.
    whenRefused(body);
  }
  return new Problem(body);
}

// Any answer, with its status and duration.
export async function exchange(method, path, body, signal, more = {}) {
  const began = performance.now();
  let answer, text;
  try {
    answer = await fetch(path, {
      method, signal, cache: "no-store", credentials: "omit",
      headers: { ...headers(), ...(body === undefined ? {} : { "Content-Type": "application/json" }), ...more },
      body: typeof body === "object" ? JSON.stringify(body) : body,
    });
    if (!answer.ok) throw await problemOf(answer);
    text = await answer.text();
  } catch (error) {
    if (error.name === "AbortError" || error instanceof Problem) throw error;
    throw new Problem(NO_ANSWER);
  }
  try {
    // A proxy that compresses makes it weak.
    const etag = answer.headers.get("etag")?.replace(/^W\//, "");
    return { status: answer.status, body: text ? parse(text) : null, etag, ms: performance.now() - began };
  } catch {
    throw new Problem(foreign(answer.status));
  }
}

export const get = async (path, signal) => (await exchange("GET", path, undefined, signal)).body;

// A token by the service's clock: this machine's may be wrong, and a token's time matters.
export const newToken = async (signal) => (await exchange("POST", "v1/tokens", { count: 1 }, signal)).body.tokens[0];

// Has the browser save an answer as a file: a link could not send the key.
export async function download(path, type, name) {
  let content;
  try {
    const answer = await fetch(path, { cache: "no-store", credentials: "omit", headers: { ...headers(), Accept: type } });
    if (!answer.ok) throw await problemOf(answer);
    content = await answer.blob();
  } catch (error) {
    throw error instanceof Problem ? error : new Problem(NO_ANSWER);
  }
  const url = URL.createObjectURL(content);
  Object.assign(document.createElement("a"), { href: url, download: name }).click();
  URL.revokeObjectURL(url);
}

// Server-sent events by fetch: EventSource cannot send a key. Reconnects when a stream ends, until aborted.
export async function listen(path, signal, hear) {
  let wait = 500;
  while (!signal.aborted) {
    try {
      const answer = await fetch(path, { signal, cache: "no-store", credentials: "omit", headers: headers() });
      if (!answer.ok) throw await problemOf(answer);
      wait = 500;
      await read(answer.body, hear);
    } catch (error) {
      if (signal.aborted) return;
      const problem = error instanceof Problem ? error.body : NO_ANSWER;
      hear("problem", problem);
      if (isFinal(problem)) return;
      wait = Math.min(wait * 2, 5000);
    }
    await new Promise((done) => setTimeout(done, wait));
  }
}

async function read(stream, hear) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    let end;
    while ((end = text.indexOf("\n\n")) >= 0) {
      const [kind, data] = text.slice(0, end).split("\n");
      text = text.slice(end + 2);
      if (data) hear(kind.slice("event: ".length), parse(data.slice("data: ".length)));
    }
  }
}
