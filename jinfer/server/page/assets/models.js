/** Dialog of models: which are in memory; loads and unloads them. */

import { lookForModels, models, Refused, residency } from "./api.js";
import { el } from "./dom.js";
import { factsOf } from "./welcome.js";

const PERIOD = 1000; // milliseconds between looks while the dialog is open
const IN_MEMORY = ["loaded", "unloading"];

/** @typedef {import("./api.js").Model} Model */

export class Models {
  /**
   * @param {HTMLDialogElement} dialog
   * @param {(models: Model[]) => void} seen called with what is served
   * @param {(error: Refused) => void} refused
   */
  constructor(dialog, seen, refused) {
    this.dialog = dialog;
    this.seen = seen;
    this.refused = refused;
    this.list = /** @type {HTMLElement} */ (dialog.querySelector("ul"));
    /** @type {Map<string, string>} what went wrong, by model */
    this.errors = new Map();
    this.shown = "";
    dialog.querySelector("#look")?.addEventListener("click", () => this.look(true));
  }

  /** Opens the dialog, and looks again and again until it is closed. */
  async open() {
    this.dialog.showModal();
    while (this.dialog.open) {
      await this.look();
      await new Promise((resolve) => setTimeout(resolve, PERIOD));
    }
  }

  /** @param {boolean} [anew] whether the server looks for models that have come or gone */
  async look(anew = false) {
    try {
      if (anew) await lookForModels();
      const found = await models();
      this.seen(found);
      this.show(found.filter((one) => !one.parent));
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      if (error.status) this.dialog.close();
      this.refused(error);
    }
  }

  /** @param {Model[]} found */
  show(found) {
    const now = JSON.stringify([found, ...this.errors]);
    if (now === this.shown) return; // the focus stays where it is
    this.shown = now;
    const focused = /** @type {HTMLElement | null} */ (document.activeElement)?.dataset.model;
    this.list.replaceChildren(...found.map((one) => this.row(one)));
    const buttons = /** @type {HTMLElement[]} */ ([...this.list.querySelectorAll("button")]);
    if (focused) buttons.find((one) => one.dataset.model === focused)?.focus();
  }

  /** @param {Model} one */
  row(one) {
    const state = one.status?.value ?? "loaded";
    const action = IN_MEMORY.includes(state) ? "unload" : "load";
    const error = this.errors.get(one.id) ?? one.status?.error;
    const words = action === "load" ? (state === "sleeping" ? "Wake" : "Load") : "Unload";
    const button = el(
      "button",
      {
        type: "button",
        "data-model": one.id,
        "aria-label": `${words} ${one.id}`,
        "aria-disabled": state.endsWith("ing") && state !== "sleeping",
        click: () => this.act(action, one),
      },
      words,
    );
    return el(
      "li",
      {},
      el(
        "div",
        {},
        el("b", {}, one.id),
        el("span", { class: `state ${state}` }, state),
        el("small", {}, [...factsOf(one), ...(one.capabilities ?? [])].join(" · ")),
        error && el("small", { class: "wrong", role: "alert" }, error),
      ),
      button,
    );
  }

  /**
   * @param {"load" | "unload"} action
   * @param {Model} one
   */
  async act(action, { id, status }) {
    if (status?.value.endsWith("ing") && status.value !== "sleeping") return;
    this.errors.delete(id);
    const acting = residency(action, id);
    setTimeout(() => this.look(), 50); // its status says that it is on the way
    try {
      await acting;
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      this.errors.set(id, error.message);
      if (error.status === 401) this.refused(error);
    }
    await this.look();
  }
}
