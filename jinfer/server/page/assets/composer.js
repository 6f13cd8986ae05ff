/** Message input: Enter sends, the field grows with its text; files are attached to it. */

import { Attachments } from "./attachments.js";
import { byId } from "./dom.js";
import { sends } from "./editor.js";

export class Composer {
  /**
   * @param {(text: string, files: import("./attachments.js").Attachment[]) => boolean} send whether it was sent
   * @param {() => void} stop
   */
  constructor(send, stop) {
    const form = /** @type {HTMLFormElement} */ (byId("composer"));
    this.input = /** @type {HTMLTextAreaElement} */ (byId("input"));
    this.sendButton = /** @type {HTMLButtonElement} */ (byId("send"));
    this.stopButton = /** @type {HTMLButtonElement} */ (byId("stop"));
    const chooser = /** @type {HTMLInputElement} */ (byId("files"));
    this.attachments = new Attachments(byId("attached"), chooser, byId("talk"));
    byId("attach").addEventListener("click", () => chooser.click());
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const { files } = this.attachments;
      if (!this.input.value.trim() && !files.length) return;
      if (!send(this.input.value, files)) return;
      this.attachments.clear();
      this.write("");
    });
    this.input.addEventListener("input", () => this.grow());
    this.input.addEventListener("keydown", (event) => {
      if (!sends(event)) return;
      event.preventDefault();
      form.requestSubmit();
    });
    this.stopButton.addEventListener("click", stop);
  }

  /** @param {string} text */
  write(text) {
    this.input.value = text;
    this.grow();
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
