/** Short words at the foot of the page, which are also read aloud. */

import { byId } from "./dom.js";

const SECONDS = 2.5;
let clears = 0;

/**
 * Says what has happened.
 * @param {string} text
 * @param {boolean} [seen] false: only to those who do not see it anyway
 */
export function say(text, seen = true) {
  const place = byId("status");
  place.classList.toggle("unseen", !seen);
  place.textContent = text;
  clearTimeout(clears);
  clears = setTimeout(() => (place.textContent = ""), SECONDS * 1000);
}

/**
 * Says what is the matter, until it is not any more.
 * @param {string} text empty: nothing is
 */
export function notice(text) {
  const place = byId("notice");
  place.hidden = !text;
  place.textContent = text;
}
