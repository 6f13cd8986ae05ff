/** Code block with a copy button. */

import { colour } from "./colours.js";
import { el, iconButton } from "./dom.js";
import { say } from "./status.js";

/**
 * @param {string} code
 * @param {string} language
 * @param {boolean} [whole] false: more is to come, so that it has no colours yet
 * @returns {HTMLElement}
 */
export function codeBlock(code, language, whole = true) {
  const place = el("code", {}, code);
  if (whole) colour(place, code, language);
  const head = el(
    "figcaption",
    {},
    el("span", {}, language),
    copyButton("Copy code", () => place.textContent ?? ""),
  );
  return el("figure", { class: "code" }, head, el("pre", { tabindex: 0 }, place));
}

/**
 * Appends to a code block.
 * @param {HTMLElement} block
 * @param {string} more
 */
export function extend(block, more) {
  const text = block.querySelector("code")?.lastChild;
  if (text instanceof Text) text.appendData(more);
}

/**
 * @param {string} label
 * @param {() => string} text
 */
export function copyButton(label, text) {
  return iconButton("copy", label, async () =>
    say((await copied(text())) ? "Copied" : "Not copied"),
  );
}

/** @param {string} text */
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copiedByHand(text);
  }
}

/**
 * Copies without the clipboard API, which browsers deny to remote pages over plain HTTP.
 * @param {string} text
 */
function copiedByHand(text) {
  const area = el("textarea", { class: "unseen", readonly: true });
  const before = /** @type {HTMLElement | null} */ (document.activeElement);
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  before?.focus();
  return done;
}
