/** A model's words as they grow: of their blocks, only those that changed are made anew. */

import { blocks, render } from "./markdown.js";

export class AnswerView {
  /** @param {HTMLElement} place */
  constructor(place) {
    this.place = place;
    /** @type {string[]} */
    this.shown = [];
  }

  /** @param {string} text all that there is so far */
  show(text) {
    const now = blocks(text);
    let same = 0;
    while (same < now.length && now[same] === this.shown[same]) same += 1;
    while (this.place.children.length > same) this.place.lastElementChild?.remove();
    this.place.append(...now.slice(same).map((block) => render(block)));
    this.shown = now;
  }
}
