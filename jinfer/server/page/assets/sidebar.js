/** The list of conversations: searched, renamed, exported, deleted. */

import { titleOf } from "./conversations.js";
import { el, iconButton } from "./dom.js";
import { download } from "./exchange.js";

/** @typedef {import("./tree.js").Conversation} Conversation */

export class Sidebar {
  /**
   * @param {HTMLElement} list
   * @param {HTMLInputElement} sought
   * @param {import("./conversations.js").Conversations} conversations
   * @param {() => void} changed called when another one is selected
   */
  constructor(list, sought, conversations, changed) {
    this.list = list;
    this.sought = sought;
    this.conversations = conversations;
    this.changed = changed;
    sought.addEventListener("input", () => this.show());
    sought.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !sought.value) return;
      event.stopPropagation();
      sought.value = "";
      this.show();
    });
  }

  show() {
    const { conversations, sought } = this;
    if (this.list.querySelector("form")) return; // a title is being edited
    const found = conversations.search(sought.value);
    const rows = found.map(({ one, around }) => this.row(one, around));
    const none =
      sought.value.trim() && !rows.length && el("li", { class: "none" }, "Nothing found");
    this.list.replaceChildren(...(none ? [none] : rows));
  }

  /**
   * @param {Conversation} one
   * @param {import("./conversations.js").Around | null} around the text that was found
   */
  row(one, around) {
    const title = titleOf(one);
    const current = one === this.conversations.current && "true";
    const known = { type: "button", title, "aria-current": current, click: () => this.open(one) };
    const [before, found, after] = around ?? [];
    const part = around && el("small", {}, before, el("mark", {}, found), after);
    const open = el("button", known, title, part);
    const actions = el(
      "span",
      { class: "actions" },
      iconButton("edit", `Rename “${title}”`, () => this.rename(one, row)),
      iconButton("export", `Export “${title}”`, () => download([one], title)),
      iconButton("trash", `Delete “${title}”`, () => this.remove(one)),
    );
    const row = el("li", {}, open, actions);
    return row;
  }

  /**
   * Edits a title in its place.
   * @param {Conversation} one
   * @param {HTMLElement} row
   */
  rename(one, row) {
    const input = el("input", { "aria-label": "Title", maxlength: 200 });
    input.value = titleOf(one);
    const form = el("form", {}, input);
    let left = false;
    /** @param {boolean} done */
    const leave = (done) => {
      if (left) return;
      left = true;
      if (done && input.value !== titleOf(one)) this.conversations.rename(one, input.value);
      form.remove();
      this.show();
      /** @type {HTMLElement | null} */ (this.list.querySelector("[aria-current]"))?.focus();
    };
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      leave(true);
    });
    input.addEventListener("blur", () => leave(true));
    input.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      leave(false);
    });
    row.replaceChildren(form);
    input.select();
    input.focus();
  }

  /** @param {Conversation} one */
  open(one) {
    this.conversations.open(one);
    this.changed();
  }

  /** @param {Conversation} one */
  remove(one) {
    const was = this.conversations.current;
    this.conversations.remove(one);
    if (was === one) this.changed();
    else this.show();
  }
}
