/** Message input: Enter sends, the field grows with its text. */

import { byId } from "./dom.js";
import { sends } from "./message.js";

export class Composer {
  /**
   * @param {(text: string) => boolean} send whether it was sent
   * @param {() => void} stop
   */
  constructor(send, stop) {
    const form = /** @type {HTMLFormElement} */ (byId("composer"));
    this.input = /** @type {HTMLTextAreaElement} */ (byId("input"));
    this.sendButton = /** @type {HTMLButtonElement} */ (byId("send"));
    this.stopButton = /** @type {HTMLButtonElement} */ (byId("stop"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!this.input.value.trim() || !send(this.input.value)) return;
      this.input.value = "";
      this.grow();
    });
    this.input.addEventListener("input", () => this.grow());
    this.input.addEventListener("keydown", (event) => {
      if (!sends(event)) return;
      event.preventDefault();
      form.requestSubmit();
    });
    this.stopButton.addEventListener("click", stop);
  }

  grow() {
    this.input.rows = Math.min(8, this.input.value.split("\n").length);
  }

  /** @param {boolean} running whether an answer is being streamed */
  busy(running) {
    const focused = document.activeElement === this.stopButton;
    this.sendButton.hidden = running;
    this.stopButton.hidden = !running;
    if (focused && !running) this.input.focus();
  }
}
