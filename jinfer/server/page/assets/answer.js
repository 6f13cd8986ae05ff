/** Streaming Markdown view of an answer: reads and renders only what may have changed. */

import { extend } from "./code.js";
import { isOpenCode, render, split } from "./markdown.js";

const UNSETTLED = 2; // blocks at the end that more text may change

/** @typedef {import("./markdown.js").Block} Block */

export class AnswerView {
  /** @param {HTMLElement} place */
  constructor(place) {
    this.place = place;
    /** The text whose blocks are settled. */
    this.settled = "";
    /** How many blocks that is. */
    this.count = 0;
    /** @type {Block[]} those after it */
    this.shown = [];
    this.growing = false;
  }

  clear() {
    this.settled = "";
    this.count = 0;
    this.shown = [];
    this.place.replaceChildren();
  }

  /**
   * @param {string} written the whole text so far
   * @param {boolean} growing whether more is to come
   */
  show(written, growing) {
    const text = written.includes("\r") ? written.replace(/\r\n?/g, "\n") : written;
    if (!text.startsWith(this.settled)) this.clear();
    const now = split(text, this.settled.length);
    const { shown } = this;
    let same = 0;
    while (same < now.length && now[same].text === shown[same]?.text) same += 1;
    // What was the last block may have waited for more.
    if (!growing && this.growing && same === now.length) same -= 1;
    this.growing = growing;
    if (!this.extended(now, same, growing)) {
      while (this.place.children.length > this.count + Math.max(same, 0))
        this.place.lastElementChild?.remove();
      const last = now.length - 1;
      for (let at = Math.max(same, 0); at <= last; at += 1)
        this.place.append(render(now[at].text, growing && at === last));
    }
    const settled = Math.max(0, now.length - UNSETTLED);
    if (settled) this.settled = text.slice(0, now[settled].start);
    this.count += settled;
    this.shown = now.slice(settled);
  }

  /**
   * Appends to the last block if that is code, and nothing else has changed.
   * @param {Block[]} now
   * @param {number} same blocks that have not changed
   * @param {boolean} growing
   */
  extended(now, same, growing) {
    const last = now.length - 1;
    const before = this.shown[last]?.text;
    if (!growing || same !== last || this.shown.length !== now.length || !before) return false;
    const { text } = now[last];
    if (!text.startsWith(before) || !isOpenCode(before) || !isOpenCode(text)) return false;
    extend(/** @type {HTMLElement} */ (this.place.lastElementChild), text.slice(before.length));
    return true;
  }
}
