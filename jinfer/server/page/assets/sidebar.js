/** The list of conversations. */

import { titleOf } from "./conversations.js";
import { el, iconButton } from "./dom.js";

/** @typedef {import("./conversations.js").Conversation} Conversation */

export class Sidebar {
  /**
   * @param {HTMLElement} list
   * @param {import("./conversations.js").Conversations} conversations
   * @param {() => void} changed called when another one is selected
   */
  constructor(list, conversations, changed) {
    this.list = list;
    this.conversations = conversations;
    this.changed = changed;
  }

  show() {
    this.list.replaceChildren(...this.conversations.all.map((one) => this.row(one)));
  }

  /** @param {Conversation} one */
  row(one) {
    const title = titleOf(one);
    const current = one === this.conversations.current && "true";
    const known = { type: "button", title, "aria-current": current, click: () => this.open(one) };
    const open = el("button", known, title);
    return el(
      "li",
      {},
      open,
      iconButton("trash", `Delete “${title}”`, () => this.remove(one)),
    );
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
