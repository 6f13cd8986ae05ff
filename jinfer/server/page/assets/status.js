/** Status line at the bottom of the page, announced by screen readers. */

import { byId } from "./dom.js";

const SECONDS = 2.5; // at least
const READ = 12; // characters a second
let clears = 0;

/**
 * Announces an event.
 * @param {string} text
 * @param {boolean} [seen] false: only for screen readers
 */
export function say(text, seen = true) {
  const place = byId("status");
  place.classList.toggle("unseen", !seen);
  place.textContent = text;
  clearTimeout(clears);
  clears = setTimeout(() => (place.textContent = ""), 1000 * Math.max(SECONDS, text.length / READ));
}

/**
 * Shows a persistent problem.
 * @param {string} text empty: none
 */
export function notice(text) {
  const place = byId("notice");
  place.hidden = !text;
  place.textContent = text;
}
