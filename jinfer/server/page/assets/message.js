/** Message view with its actions: edit, regenerate, continue, copy, other versions. */

import { AnswerView } from "./answer.js";
import { cards } from "./attachments.js";
import { copyButton } from "./code.js";
import { el, iconButton } from "./dom.js";
import { editor } from "./editor.js";
import { callCards, resultCards, resultForm } from "./tools.js";

/**
 * @typedef {import("./tree.js").Message} Message
 *
 * @typedef {object} Actions
 * @property {(message: Message, text: string) => void} resend asks with an edited text instead
 * @property {(message: Message, text: string) => void} rewrite has an edited answer instead
 * @property {(message: Message) => void} regenerate requests another answer
 * @property {(message: Message) => void} goOn continues an answer
 * @property {(message: Message, results: {id: string, content: string}[]) => void} returned
 * @property {(message: Message, step: number) => void} step shows another version
 *
 * @typedef {object} Place of a message in its conversation
 * @property {number} at among its versions
 * @property {number} of how many they are
 * @property {boolean} last whether none follows
 * @property {Message[]} before
 */

const WHO = { user: "You", assistant: "Model", tool: "Results of tools" };

export class MessageView {
  /**
   * @param {Message} message
   * @param {Actions} actions
   */
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.growing = false;
    this.last = false;
    this.text = el("div", { class: "text" });
    this.answer = new AnswerView(this.text);
    this.thoughts = el("div", { class: "thoughts" });
    this.summary = el("summary");
    this.reasoning = el("details", { class: "card", hidden: true }, this.summary, this.thoughts);
    this.cards = el("div", { class: "cards" });
    this.error = el("p", { class: "error", role: "alert", hidden: true });
    this.note = el("span", { class: "note" });
    this.versions = el("span", { class: "versions" });
    this.goOn = iconButton("continue", "Continue", () => actions.goOn(message));
    this.foot = el("footer", {}, this.versions, ...this.buttons(), this.note);
    const name = el("h2", { class: "unseen" }, WHO[message.role]);
    const { reasoning, cards: shown, text, error, foot } = this;
    const parts = { user: [shown, text], assistant: [reasoning, text, shown], tool: [shown] };
    this.element = el(
      "article",
      { class: message.role },
      name,
      ...parts[message.role],
      error,
      foot,
    );
    this.show(false);
  }

  buttons() {
    const { message, actions } = this;
    const copy = copyButton("Copy message", () => message.content);
    const edit = iconButton("edit", "Edit", () => this.edit());
    if (message.role === "user") return [edit, copy];
    if (message.role === "tool") return [];
    const again = iconButton("again", "Regenerate", () => actions.regenerate(message));
    return [again, this.goOn, edit, copy];
  }

  /** @param {Place} place */
  arrange({ at, of, last, before }) {
    const { message, actions } = this;
    const calls = before.findLast((one) => one.calls)?.calls ?? [];
    if (message.results) this.cards.replaceChildren(...resultCards(message.results, calls));
    /**
     * @param {string} symbol
     * @param {string} label
     * @param {number} step
     */
    const stepper = (symbol, label, step) => {
      const button = iconButton(symbol, label, () => actions.step(message, step));
      button.disabled = at + step < 0 || at + step >= of;
      return button;
    };
    const shown = [
      stepper("before", "Previous version", -1),
      el("span", { "aria-label": `Version ${at + 1} of ${of}` }, `${at + 1}/${of}`),
      stepper("after", "Next version", 1),
    ];
    this.versions.replaceChildren(...(of > 1 ? shown : []));
    const was = this.last;
    this.last = last;
    if (was !== last) this.show(this.growing);
  }

  /** @param {boolean} growing whether more is to come */
  show(growing) {
    const { role, content, reasoning, note, error, cut } = this.message;
    this.growing = growing;
    if (role === "user") this.text.textContent = content;
    else if (role === "assistant") this.answer.show(content, growing);
    this.text.hidden = !content && !(growing && !reasoning);
    this.reasoning.hidden = !reasoning;
    this.summary.textContent = growing && !content ? "Thinking…" : "Thoughts";
    append(this.thoughts, reasoning ?? "");
    if (role !== "tool") this.cards.replaceChildren(...this.shownCards());
    this.error.hidden = !error;
    this.error.textContent = error ?? "";
    this.note.textContent = note ?? "";
    this.foot.hidden = growing;
    this.goOn.hidden = !this.last || !cut || !content;
    this.element.classList.toggle("growing", growing);
  }

  shownCards() {
    const { files, calls, error } = this.message;
    if (files) return cards(files);
    if (!calls?.length) return [];
    if (this.growing || !this.last || error) return callCards(calls, this.growing);
    return [resultForm(calls, (results) => this.actions.returned(this.message, results))];
  }

  /** Opens the editor. */
  edit() {
    const { message, actions } = this;
    const user = message.role === "user";
    const done = user ? actions.resend : actions.rewrite;
    const leave = () => {
      form.replaceWith(this.text);
      this.foot.hidden = false;
    };
    const form = editor(
      message.content,
      user ? "Send" : "Save",
      (text) => {
        leave();
        done(message, text);
      },
      () => {
        leave();
        /** @type {HTMLElement | null} */ (this.foot.querySelector("[title=Edit]"))?.focus();
      },
    );
    this.text.replaceWith(form);
    this.foot.hidden = true;
  }
}

/**
 * Makes a text that grows the content of an element.
 * @param {HTMLElement} place
 * @param {string} text
 */
function append(place, text) {
  const shown = place.firstChild;
  if (shown instanceof Text && text.startsWith(shown.data))
    shown.appendData(text.slice(shown.data.length));
  else place.textContent = text;
}
