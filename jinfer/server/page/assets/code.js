/** Code block with a copy button. */

import { el, iconButton } from "./dom.js";
import { say } from "./status.js";

/**
 * @param {string} code
 * @param {string} language
 * @returns {HTMLElement}
 */
export function codeBlock(code, language) {
  const head = el(
    "figcaption",
    {},
    el("span", {}, language),
    copyButton("Copy code", () => code),
  );
  return el("figure", { class: "code" }, head, el("pre", { tabindex: 0 }, el("code", {}, code)));
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
