/** Entry point: connects the parts of the page. */

import * as api from "./api.js";
import { Chat } from "./chat.js";
import { Composer } from "./composer.js";
import { Conversations } from "./conversations.js";
import { byId, el } from "./dom.js";
import { Engine } from "./engine.js";
import { askForKey } from "./key.js";
import { Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { notice } from "./status.js";
import { stored } from "./store.js";
import { tabs } from "./tabs.js";
import { themeButton } from "./theme.js";

const AGAIN = 1000; // milliseconds until a server that is not ready is asked again

const model = /** @type {HTMLSelectElement} */ (byId("model"));
const dialog = /** @type {HTMLDialogElement} */ (byId("settings"));
const aside = byId("aside");
const menu = byId("menu");
const chosen = stored("model", "");

const conversations = new Conversations();
const settings = new Settings(byId("parameters"), byId("system"), (count) => {
  byId("settings-count").textContent = count || "";
});
const chat = new Chat(byId("log"), {
  conversations,
  asked,
  system: () => settings.system.value,
  changed: () => {
    composer.busy(chat.running !== null);
    sidebar.show();
  },
  refused,
});
const composer = new Composer(
  (text) => chat.send(text),
  () => chat.stop(),
);
const sidebar = new Sidebar(byId("conversations"), conversations, opened);
const engine = new Engine(byId("plots"), () => model.value, refused);

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
  sidebar.show();
  composer.busy(false);
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
    const models = await api.models();
    list(models);
    settings.describe(await api.fields());
    await modelChanged(models);
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

/** @param {api.Model[]} models */
function list(models) {
  const options = models.map(({ id, capabilities }) => {
    const chats = capabilities?.includes("chat") ?? true;
    return el("option", { value: id, disabled: !chats }, chats ? id : `${id} (no chat)`);
  });
  model.replaceChildren(...options);
  const named = options.find((one) => one.value === chosen.value && !one.disabled);
  (named ?? options.find((one) => !one.disabled) ?? options[0]).selected = true;
}

/**
 * Shows the model's default settings; does not load a model for that.
 * @param {api.Model[]} models
 */
async function modelChanged(models) {
  engine.clear();
  const one = models.find(({ id }) => id === model.value);
  settings.defaults(one?.status?.value === "loaded" ? await api.defaults(model.value) : {});
}

model.addEventListener("change", () => {
  chosen.set(model.value);
  api.models().then(modelChanged).catch(refused);
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
  if (chat.running) conversations.save(conversations.current);
});

themeButton(byId("theme"));
tabs(byId("tabs"), (id) => engine.visible(id === "engine"));
opened();
requestAnimationFrame(() => composer.input.focus()); // nothing has focus before it is drawn
connect();
