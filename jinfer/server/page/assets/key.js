/** Asks for the key of a server that wants one; it is kept until the tab is closed. */

import { byId } from "./dom.js";
import { key } from "./store.js";

/**
 * Has a person give a key.
 * @param {string} why
 * @returns {Promise<boolean>} whether one was given
 */
export function askForKey(why) {
  const dialog = /** @type {HTMLDialogElement} */ (byId("key"));
  const input = /** @type {HTMLInputElement} */ (byId("key-input"));
  byId("key-why").textContent = why;
  input.value = key.value;
  dialog.returnValue = "";
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    const closed = () => {
      const given = dialog.returnValue === "given";
      if (given) key.set(input.value.trim());
      resolve(given);
    };
    dialog.addEventListener("close", closed, { once: true });
  });
}
