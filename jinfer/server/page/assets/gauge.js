/** Gauge of the context: how much of it the conversation fills. */

/** Shows it. */
export class Gauge {
  /** @param {HTMLElement} place with a bar and a text */
  constructor(place) {
    this.place = place;
    this.bar = /** @type {HTMLElement} */ (place.querySelector(".fill"));
    this.text = /** @type {HTMLElement} */ (place.querySelector(".amount"));
  }

  /**
   * @param {number | undefined} used tokens of the latest answer's prompt and of itself
   * @param {number | undefined} context tokens that it may have; unknown before a model is loaded
   */
  show(used, context) {
    this.place.hidden = used === undefined || !context;
    if (used === undefined || !context) return;
    const share = Math.min(1, used / context);
    const words = `${used.toLocaleString("en")} of ${context.toLocaleString("en")} tokens`;
    this.bar.style.width = `${100 * share}%`;
    this.text.textContent = words;
    this.place.classList.toggle("nearly", share >= 0.9);
    this.place.setAttribute("aria-valuenow", String(Math.min(used, context)));
    this.place.setAttribute("aria-valuemax", String(context));
    this.place.setAttribute("aria-valuetext", `Context: ${words}`);
    this.place.title = `Context: ${words}, ${Math.round(100 * share)} %`;
  }
}
