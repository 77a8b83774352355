// API keys: those that the key in use reaches; create one, which is shown once; revoke one, confirmed by typing.
import { exchange, get, keyId } from "./api.js";
import { age, choices, code, confirmation, dialog, h, say, table } from "./dom.js";
import { live } from "./live.js";

const EVERY_MS = 30000;
const SCOPES = [["read", "Read counts, events and history."], ["write", "And add and clear."], ["admin", "And change namespaces, and create keys like these."]];
const ENDS = [["30d", "in 30 days"], ["90d", "in 90 days"], ["365d", "in a year"], ["", "never, or with the key in use"]];

export async function keysView(place, signal) {
  const { keys } = await get("v1/keys", signal);
  const body = h("div");
  const paint = (found) => body.replaceChildren(list(found, load));
  const load = async () => paint((await get("v1/keys", signal)).keys);
  const refresh = () => body.contains(document.activeElement) || load();
  const isOpen = keyId() === null;
  place.append(
    h("div", { class: "row between" }, h("h1", {}, "API keys"), isOpen ? null : h("button", { type: "button", id: "new-key", onclick: () => create(load) }, "New key")));
  if (isOpen) {
    place.append(h("p", { class: "empty" }, "This service has no API keys: requests need none. Create the first one on its machine: ", code("counter key create --namespace '*' --scope admin")));
    return;
  }
  paint(keys);
  place.append(h("div", { class: "row between" }, h("p", { class: "lead" }, "Keys within the namespaces of the key in use. A key can create only keys that allow no more than itself."), live(refresh, EVERY_MS, signal)), body);
}

function list(keys, load) {
  const rows = keys.map((each) => h("tr", {},
    h("th", { scope: "row" }, code(each.id), each.id === keyId() ? " (in use)" : null, each.label ? h("div", { class: "fine" }, each.label) : null),
    h("td", {}, each.namespaces.join(", ")),
    h("td", {}, each.scope, h("div", { class: "fine" }, Object.entries(each.limits).map(([name, per]) => `${name.replace("_per_s", "")} ${per || "any"}/s`).join(", "))),
    h("td", {}, age(each.created_at)),
    h("td", {}, each.expires_at ? age(each.expires_at) : "never"),
    h("td", {}, each.last_used ? age(each.last_used) : "never"),
    h("td", {}, h("span", { class: each.state === "valid" ? "state on" : "state" }, each.state)),
    h("td", { class: "number" }, each.state === "revoked" ? null
      : h("button", { type: "button", class: "quiet small", "aria-label": `Revoke the key ${each.id}`, onclick: () => revoke(each, load) }, "Revoke"))));
  return table("API keys", ["Key", "Namespaces", "Scope", "Created", "Expires", "Last used", "State", { text: "Action", number: true }], rows);
}

function create(load) {
  const namespaces = h("input", { id: "key-namespaces", type: "text", required: true, autocomplete: "off", spellcheck: "false", "aria-describedby": "key-about" });
  const label = h("input", { id: "key-label", type: "text", maxlength: 100, autocomplete: "off" });
  const ends = h("select", { id: "key-ends" }, ENDS.map(([value, text]) => h("option", { value }, text)));
  dialog("New key", [
    h("label", { for: "key-namespaces" }, "Namespaces"), namespaces,
    h("p", { class: "fine", id: "key-about" }, "Names, separated by spaces; team-* for all that begin with team-, * for all."),
    choices("Scope", "scope", SCOPES),
    h("label", { for: "key-ends" }, "It ends"), ends,
    h("label", { for: "key-label" }, "Label, for people"), label,
  ], "Create", async (form, box) => {
    const asked = { namespaces: namespaces.value.split(/[\s,]+/).filter(Boolean), scope: form.elements.scope.value, label: label.value };
    const { body } = await exchange("POST", "v1/keys", ends.value ? { ...asked, expires: ends.value } : asked);
    box.close();
    showOnce(body); // Before anything that may fail.
    await load();
  });
}

// Closed only by its button: the key cannot be shown again.
function showOnce(made) {
  const text = h("input", { id: "made-key", type: "text", readonly: true, spellcheck: "false" });
  text.value = made.key; // Not as an attribute, which would stay in the document when the value is emptied.
  const copied = h("span", { class: "fine", role: "status" });
  const copy = async () => {
    text.select();
    try {
      await navigator.clipboard.writeText(made.key);
      copied.textContent = "Copied.";
    } catch {
      copied.textContent = "Selected: copy it with the keyboard.";
    }
  };
  const { box, form } = dialog("The new key", [
    h("p", {}, "Store it now: ", h("strong", {}, "this is the only time that it is shown.")),
    h("label", { for: "made-key" }, `Key ${made.id}`), text,
    h("div", { class: "row" }, h("button", { type: "button", class: "quiet", id: "copy-key", onclick: copy }, "Copy"), copied),
  ], "Done", () => {
    text.value = "";
    box.close();
  });
  form.querySelector(".row:last-child .quiet").remove();
  box.addEventListener("cancel", (event) => event.preventDefault());
  say(`The key ${made.id} is created.`);
}

function revoke(key, load) {
  confirmation(`Revoke ${key.id}?`, [
    h("p", {}, key.id === keyId() ? h("strong", {}, "This page uses this key: you will be signed out. ") : null,
      "Within seconds no process accepts it any more. This cannot be undone."),
  ], "key’s id", key.id, "Revoke", async () => {
    await exchange("DELETE", `v1/keys/${key.id}`);
    await load();
    say(`The key ${key.id} is revoked.`);
  });
}
