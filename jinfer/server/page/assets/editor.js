/** Editor of a message, in its place. */

import { el } from "./dom.js";

/**
 * @param {string} text
 * @param {string} label of the button that is done with it
 * @param {(text: string) => void} done
 * @param {() => void} left called when it is left without a change
 */
export function editor(text, label, done, left) {
  const rows = Math.min(16, Math.max(3, text.split("\n").length));
  const area = el("textarea", { "aria-label": "Edit message", rows });
  area.value = text;
  const buttons = el(
    "div",
    {},
    el("button", { type: "submit", class: "primary" }, label),
    el("button", { type: "button", click: left }, "Cancel"),
  );
  const form = el("form", { class: "edit" }, area, buttons);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (area.value.trim()) done(area.value);
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      left();
    }
    if (event.target === area && sends(event)) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  requestAnimationFrame(() => area.focus());
  return form;
}

/**
 * Whether a key sends the text: Enter, without Shift and not while an input method composes.
 * @param {KeyboardEvent} event
 */
export function sends(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing;
}
