/** API key dialog; the key is kept until the tab is closed. */

import { byId } from "./dom.js";
import { key } from "./store.js";

/** @type {Promise<boolean> | null} */
let asking = null;

/**
 * Asks the user for a key.
 * @param {string} why
 * @returns {Promise<boolean>} whether one was entered; concurrent calls share the dialog
 */
export function askForKey(why) {
  asking ??= asked(why).finally(() => (asking = null));
  return asking;
}

/**
 * @param {string} why
 * @returns {Promise<boolean>}
 */
function asked(why) {
  const dialog = /** @type {HTMLDialogElement} */ (byId("key"));
  const input = /** @type {HTMLInputElement} */ (byId("key-input"));
  byId("key-why").textContent = why;
  input.value = key.value;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    const closed = () => {
      const given = dialog.returnValue === "given";
      if (given) key.set(input.value.trim());
      resolve(given);
    };
    dialog.addEventListener("close", closed, { once: true });
  });
}
