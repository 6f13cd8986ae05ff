/** Entry point: connects the parts of the page. */

import * as api from "./api.js";
import { Chat } from "./chat.js";
import { Composer } from "./composer.js";
import { Conversations } from "./conversations.js";
import { byId, el } from "./dom.js";
import { Engine } from "./engine.js";
import { exchange } from "./exchange_buttons.js";
import { Gauge } from "./gauge.js";
import { askForKey } from "./key.js";
import { Models } from "./models.js";
import { Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { notice } from "./status.js";
import { stored } from "./store.js";
import { tabs } from "./tabs.js";
import { themeButton } from "./theme.js";
import { branch } from "./tree.js";
import { welcome } from "./welcome.js";

const AGAIN = 1000; // milliseconds until a server that is not ready is asked again

const model = /** @type {HTMLSelectElement} */ (byId("model"));
const dialog = /** @type {HTMLDialogElement} */ (byId("settings"));
const aside = byId("aside");
const menu = byId("menu");
const chosen = stored("model", "");

/** @type {api.Model[]} */
let served = [];

const conversations = new Conversations();
const settings = new Settings(byId("parameters"), byId("system"), byId("tools"), (count) => {
  byId("settings-count").textContent = count || "";
});
const gauge = new Gauge(byId("gauge"));
const chat = new Chat(byId("log"), {
  conversations,
  asked,
  system: () => settings.system.value,
  welcome: () => welcome(selected(), ask),
  changed,
  refused,
});
const composer = new Composer(
  (text, files) => chat.send(text, files),
  () => chat.stop(),
);
const sidebar = new Sidebar(byId("conversations"), byId("sought"), conversations, opened);
const engine = new Engine(byId("plots"), () => model.value, refused);
const models = new Models(byId("models"), list, refused);

/** The model that is asked, once it is known. */
function selected() {
  return served.find(({ id }) => id === model.value);
}

/**
 * Writes a question for the user to send.
 * @param {string} question
 */
function ask(question) {
  composer.write(question);
  composer.input.focus();
}

/** Shows what follows from the messages. */
function changed() {
  composer.busy(chat.running !== null);
  engine.busy(chat.running !== null);
  sidebar.show();
  const used = branch(conversations.current).findLast((one) => one.used)?.used;
  gauge.show(used, selected()?.max_model_len);
  // The first answer of a model has loaded it.
  if (used && !chat.running && !selected()?.max_model_len) api.models().then(list).catch(refused);
}

/** The fields of a request; if a setting is invalid, null, and the settings are shown. */
function asked() {
  const values = settings.values();
  if (values) return model.value ? { model: model.value, ...values } : null;
  dialog.showModal();
  /** @type {HTMLFormElement} */ (byId("settings-form")).reportValidity();
  return null;
}

/** Shows another conversation. */
function opened() {
  chat.open();
  changed();
  showMenu(false);
}

/** @param {boolean} open whether the sidebar is open on a narrow screen */
function showMenu(open) {
  aside.classList.toggle("open", open);
  menu.setAttribute("aria-expanded", String(open));
}

/** @param {unknown} error */
async function refused(error) {
  if (!(error instanceof api.Refused)) throw error;
  if (error.status === 401 && (await askForKey(error.message))) await connect();
}

/** Waits until the server is ready, and loads its models and schemas. */
async function connect() {
  while (!(await known())) await new Promise((resolve) => setTimeout(resolve, AGAIN));
}

/** Whether the server has answered, with success or an error. */
async function known() {
  try {
    if (!(await api.healthy())) {
      notice("The model is being loaded…");
      return false;
    }
    list(await api.models());
    settings.describe(await api.fields());
    await modelChanged();
    notice("");
    engine.visible(engine.wanted);
    return true;
  } catch (error) {
    if (!(error instanceof api.Refused)) throw error;
    notice(error.message);
    refused(error);
    return error.status !== 0;
  }
}

/**
 * Shows what is served.
 * @param {api.Model[]} found
 */
function list(found) {
  const before = selected();
  served = found;
  const options = found.map(({ id, capabilities }) => {
    const chats = capabilities?.includes("chat") ?? true;
    return el("option", { value: id, disabled: !chats }, chats ? id : `${id} (no chat)`);
  });
  model.replaceChildren(...options);
  const named = options.find((one) => one.value === chosen.value && !one.disabled);
  const shown = named ?? options.find((one) => !one.disabled) ?? options[0];
  if (shown) shown.selected = true;
  if (JSON.stringify(before) === JSON.stringify(selected())) return;
  if (before && before.status?.value !== selected()?.status?.value) modelChanged().catch(refused);
  if (!conversations.current.messages.length) chat.arrange();
  changed();
}

/** Shows the model's default settings; does not load a model for that. */
async function modelChanged() {
  engine.clear();
  const loaded = selected()?.status?.value === "loaded";
  settings.defaults(loaded ? await api.defaults(model.value) : {});
}

model.addEventListener("change", () => {
  chosen.set(model.value);
  if (!conversations.current.messages.length) chat.arrange();
  changed();
  api
    .models()
    .then((found) => {
      list(found);
      return modelChanged();
    })
    .catch(refused);
});
menu.addEventListener("click", () => showMenu(!aside.classList.contains("open")));
byId("new").addEventListener("click", () => {
  conversations.begin();
  opened();
  composer.input.focus();
});
byId("clear").addEventListener("click", () => {
  if (!confirm("Delete all conversations that this browser keeps?")) return;
  conversations.clear();
  opened();
});
exchange(conversations, opened);
byId("open-models").addEventListener("click", () => models.open());
byId("open-settings").addEventListener("click", () => dialog.showModal());
byId("reset").addEventListener("click", () => settings.reset());
byId("change-key").addEventListener("click", () =>
  refused(new api.Refused("The key that opens this server.", 401)),
);
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  showMenu(false);
  chat.stop();
});
addEventListener("pagehide", () => {
  if (chat.running) conversations.write(conversations.current);
});
document.addEventListener("visibilitychange", async () => {
  if (document.hidden || chat.running) return;
  if (await conversations.reload()) opened();
  else sidebar.show();
});

themeButton(byId("theme"));
await conversations.load();
tabs(byId("tabs"), (id) => engine.visible(id === "engine"));
opened();
requestAnimationFrame(() => composer.input.focus()); // nothing has focus before it is drawn
connect();
