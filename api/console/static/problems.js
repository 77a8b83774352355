// A problem document, with what to do about it.
import { code, h } from "./dom.js";

const WHAT_TO_DO = {
  no_answer: "Check whether the process runs, then try again.",
  key_missing: "Enter an API key: the button is at the top right.",
  key_invalid: "Enter a key that is valid now. “counter key list” shows which are.",
  scope_insufficient: "Use a key with a wider scope, or one for the namespace “*” if the message says so.",
  origin_refused: "Open the console at localhost, or at a name in the setting “hosts”.",
  quota_exceeded: "Delete a namespace, or raise the quota in the service’s settings.",
  namespace_unknown: "Look at the list of namespaces. A key sees only those that it covers.",
  not_supported: "A BEST_EFFORT namespace keeps no events, and bounds and holds need SQLite or PostgreSQL.",
  token_conflict: "The first payload remains in effect. Find out why a client used the token twice.",
  token_too_old: "If the add is still wanted, send it with a new token.",
  token_cancelled: "Nothing: it counts no more. Send it with a new token only if it is wanted after all.",
  bound_reached: "Add less, or wait until the count has changed; either is another add, with a new token.",
  hold_unknown: "Wait a moment and look again; a cancel of its token makes sure.",
  hold_settled: "Nothing: the settled amount counts. What else it cost is an add without a hold.",
  hold_released: "Count what was used by an add without a hold.",
  hold_expired: "Count what was used by an add without a hold.",
  overloaded: "Wait a moment, then try again.",
  rate_limited: "Wait a moment, then try again.",
  store_unavailable: "Check /readyz and the service’s log; acknowledged adds are safe.",
};
const BY_RETRY = {
  same_token: "Send the same request again.",
  new_token: "Send it with a new token.",
  never: "Fix what the message names; the same request would be rejected again.",
};

export function problemBox(body, again) {
  // The button disappears with the box, so move the focus.
  const retry = async () => {
    await again();
    if (document.activeElement === document.body) document.getElementById("main").focus({ preventScroll: true });
  };
  const wait = body.retry_after ? ` Wait ${body.retry_after} s first.` : "";
  return h("section", { class: "problem", role: "alert" },
    h("h2", {}, body.title),
    h("p", {}, body.detail),
    h("p", { class: "todo" }, (body.todo ?? WHAT_TO_DO[body.code] ?? BY_RETRY[body.retry] ?? "") + wait),
    h("p", { class: "fine" }, code(body.code), body.status ? ` · HTTP ${body.status}` : null,
      body.code === "no_answer" ? null : [" · ", h("a", { href: `problems#${body.code}` }, "what it means")]),
    again ? h("button", { type: "button", onclick: retry }, "Try again") : null);
}
