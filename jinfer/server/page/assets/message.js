/** Message view with its actions: edit, regenerate, copy. */

import { AnswerView } from "./answer.js";
import { copyButton } from "./code.js";
import { el, iconButton } from "./dom.js";

/**
 * @typedef {import("./conversations.js").Message} Message
 *
 * @typedef {object} Actions
 * @property {(message: Message, text: string) => void} resend sends an edited text in its place
 * @property {(message: Message) => void} regenerate requests another answer
 */

export class MessageView {
  /**
   * @param {Message} message
   * @param {Actions} actions
   */
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.text = el("div", { class: "text" });
    this.answer = new AnswerView(this.text);
    this.thoughts = el("div", { class: "thoughts" });
    this.summary = el("summary");
    this.reasoning = el("details", { hidden: true }, this.summary, this.thoughts);
    this.error = el("p", { class: "error", role: "alert", hidden: true });
    this.note = el("span", { class: "note" });
    this.foot = el("footer", {}, ...this.buttons(), this.note);
    const who = message.role === "user" ? "You" : "Model";
    const name = el("h2", { class: "unseen" }, who);
    const parts = [name, this.reasoning, this.text, this.error, this.foot];
    this.element = el("article", { class: message.role }, ...parts);
    this.show(false);
  }

  buttons() {
    const copy = copyButton("Copy message", () => this.message.content);
    if (this.message.role === "user") return [iconButton("edit", "Edit", () => this.edit()), copy];
    return [iconButton("again", "Regenerate", () => this.actions.regenerate(this.message)), copy];
  }

  /** @param {boolean} growing whether more is to come */
  show(growing) {
    const { role, content, reasoning, note, error } = this.message;
    if (role === "user") this.text.textContent = content;
    else this.answer.show(content);
    this.reasoning.hidden = !reasoning;
    this.summary.textContent = growing && !content ? "Thinking…" : "Thoughts";
    this.thoughts.textContent = reasoning ?? "";
    this.error.hidden = !error;
    this.error.textContent = error ?? "";
    this.note.textContent = note ?? "";
    this.foot.hidden = growing;
    this.element.classList.toggle("growing", growing);
  }

  /** Opens the editor. */
  edit() {
    const area = el("textarea", { "aria-label": "Edit message", rows: 3 });
    area.value = this.message.content;
    const form = el(
      "form",
      { class: "edit" },
      area,
      el(
        "div",
        {},
        el("button", { type: "submit", class: "primary" }, "Send"),
        el("button", { type: "button", click: () => this.leave(form) }, "Cancel"),
      ),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (area.value.trim()) this.actions.resend(this.message, area.value);
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.leave(form);
      if (event.target === area && sends(event)) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    this.text.replaceWith(form);
    this.foot.hidden = true;
    area.focus();
  }

  /** @param {HTMLFormElement} form */
  leave(form) {
    form.replaceWith(this.text);
    this.foot.hidden = false;
    this.foot.querySelector("button")?.focus();
  }
}

/**
 * Whether a key sends the text: Enter, without Shift and not while an input method composes.
 * @param {KeyboardEvent} event
 */
export function sends(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing;
}
