/** Streaming Markdown view of an answer: re-renders only the blocks that changed. */

import { blocks, render } from "./markdown.js";

export class AnswerView {
  /** @param {HTMLElement} place */
  constructor(place) {
    this.place = place;
    /** @type {string[]} */
    this.shown = [];
  }

  /** @param {string} text the whole text so far */
  show(text) {
    const now = blocks(text);
    let same = 0;
    while (same < now.length && now[same] === this.shown[same]) same += 1;
    while (this.place.children.length > same) this.place.lastElementChild?.remove();
    this.place.append(...now.slice(same).map((block) => render(block)));
    this.shown = now;
  }
}
