/** Streaming Markdown view of an answer: reads and renders only what may have changed. */

import { extend } from "./code.js";
import { isOpenCode, render, split } from "./markdown.js";

const SEEN = 100; // characters that are compared
const UNSETTLED = 2; // blocks at the end that more text may change

/** @typedef {import("./markdown.js").Block} Block */

export class AnswerView {
  /** @param {HTMLElement} place */
  constructor(place) {
    this.place = place;
    /** The text that is shown. */
    this.text = "";
    /** Where in it the blocks begin that more text may change. */
    this.settled = 0;
    /** @type {Block[]} those after it */
    this.shown = [];
    this.growing = false;
  }

  /**
   * @param {string} written the whole text so far
   * @param {boolean} growing whether more is to come
   */
  show(written, growing) {
    const text = written.includes("\r") ? written.replace(/\r\n?/g, "\n") : written;
    if (!this.continues(text)) this.clear();
    if (!this.extended(text, growing)) this.update(text, growing);
    this.text = text;
    this.growing = growing;
  }

  /**
   * Whether a text goes on with the one that is shown, by its length and what was last in it.
   * @param {string} text
   */
  continues(text) {
    const { length } = this.text;
    const from = Math.max(0, length - SEEN);
    return text.length >= length && text.slice(from, length) === this.text.slice(from);
  }

  clear() {
    this.text = "";
    this.settled = 0;
    this.shown = [];
    this.place.replaceChildren();
  }

  /**
   * Appends to the last block if that is code whose end has not come.
   * @param {string} text
   * @param {boolean} growing
   * @returns {boolean} whether that is all that has changed
   */
  extended(text, growing) {
    const last = this.shown.at(-1);
    const more = text.slice(this.text.length);
    if (!growing || !this.growing || !last || /[`~]/.test(more)) return false;
    if (!isOpenCode(last.text)) return false;
    extend(/** @type {HTMLElement} */ (this.place.lastElementChild), more);
    last.text += more;
    return true;
  }

  /**
   * Renders the blocks that have changed.
   * @param {string} text
   * @param {boolean} growing
   */
  update(text, growing) {
    const now = split(text, this.settled);
    let same = 0;
    while (same < now.length && now[same].text === this.shown[same]?.text) same += 1;
    // What was the last block may have waited for more.
    if (!growing && this.growing && same === now.length) same = Math.max(0, same - 1);
    for (let n = same; n < this.shown.length; n += 1) this.place.lastElementChild?.remove();
    for (let at = same; at < now.length; at += 1)
      this.place.append(render(now[at].text, growing && at === now.length - 1));
    const settled = Math.max(0, now.length - UNSETTLED);
    if (settled) this.settled = now[settled].start;
    this.shown = now.slice(settled);
  }
}
