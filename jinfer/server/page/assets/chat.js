/** Chat view: the messages of a conversation, and the answer that is being streamed. */

import { chat, Refused } from "./api.js";
import { el } from "./dom.js";
import { MessageView } from "./message.js";
import { say } from "./status.js";

/**
 * @typedef {import("./conversations.js").Message} Message
 *
 * @typedef {object} Around
 * @property {import("./conversations.js").Conversations} conversations
 * @property {() => Record<string, unknown> | null} asked the fields of each request; null: invalid settings
 * @property {() => string} system the system prompt
 * @property {() => void} changed called when messages change
 * @property {(error: Refused) => void} refused called with a failed request
 */

export class Chat {
  /**
   * @param {HTMLElement} log container of the messages
   * @param {Around} around
   */
  constructor(log, around) {
    this.log = log;
    this.around = around;
    /** @type {AbortController | null} */
    this.running = null;
  }

  get messages() {
    return this.around.conversations.current.messages;
  }

  set messages(messages) {
    this.around.conversations.current.messages = messages;
  }

  /** Shows the current conversation; cancels an answer in another one. */
  open() {
    this.stop();
    const empty = el(
      "p",
      { class: "empty" },
      "Ask something. Enter sends, Shift+Enter begins a new line, Esc stops.",
    );
    const shown = this.messages.map((one) => this.view(one).element);
    this.log.replaceChildren(...(shown.length ? shown : [empty]));
    this.log.scrollTop = this.log.scrollHeight;
  }

  /** @param {Message} message */
  view(message) {
    return new MessageView(message, {
      resend: (one, text) => this.from(one, [{ role: "user", content: text }]),
      regenerate: (one) => this.from(one, []),
    });
  }

  /**
   * @param {string} text
   * @returns {boolean} whether it was sent
   */
  send(text) {
    return this.go([...this.messages, { role: "user", content: text }]);
  }

  /**
   * Replaces a message and all that follow it.
   * @param {Message} message
   * @param {Message[]} others
   */
  from(message, others) {
    this.go([...this.messages.slice(0, this.messages.indexOf(message)), ...others]);
  }

  /** Cancels the answer that is being streamed, here and on the server. */
  stop() {
    this.running?.abort();
    this.running = null;
  }

  /**
   * Requests an answer.
   * @param {Message[]} messages
   * @returns {boolean} whether it was requested
   */
  go(messages) {
    const asked = this.around.asked();
    if (!asked) return false;
    this.stop();
    const turns = messages.map(({ role, content }) => ({ role: String(role), content }));
    const system = this.around.system();
    if (system.trim()) turns.unshift({ role: "system", content: system });
    /** @type {Message} */
    const answer = { role: "assistant", content: "" };
    this.messages = [...messages, answer];
    this.answer({ ...asked, messages: turns }, answer);
    return true;
  }

  /**
   * Streams an answer to the view, and saves it.
   * @param {{messages: import("./api.js").Turn[]}} asked
   * @param {Message} answer
   */
  async answer(asked, answer) {
    const { conversations, changed } = this.around;
    const conversation = conversations.current;
    const running = (this.running = new AbortController());
    const views = this.messages.map((one) => this.view(one));
    const view = /** @type {MessageView} */ (views.at(-1));
    view.show(true);
    this.log.replaceChildren(...views.map((one) => one.element));
    this.log.setAttribute("aria-busy", "true");
    this.log.scrollTop = this.log.scrollHeight;
    conversations.save(conversation);
    changed();
    await this.read(asked, answer, view, running.signal);
    if (conversations.all.includes(conversation)) conversations.save(conversation);
    if (this.running !== running && this.running !== null) return;
    this.running = null;
    this.log.setAttribute("aria-busy", "false");
    changed();
  }

  /**
   * Reads an answer until it ends or is stopped.
   * @param {{messages: import("./api.js").Turn[]}} asked
   * @param {Message} answer
   * @param {MessageView} view
   * @param {AbortSignal} signal
   */
  async read(asked, answer, view, signal) {
    /** @type {import("./api.js").Piece} */
    const last = {};
    let frame = 0;
    try {
      for await (const piece of chat(asked, signal)) {
        answer.content += piece.content;
        if (piece.reasoning) answer.reasoning = (answer.reasoning ?? "") + piece.reasoning;
        for (const name of /** @type {const} */ (["reason", "usage", "timings"])) {
          if (piece[name]) Object.assign(last, { [name]: piece[name] });
        }
        frame ||= requestAnimationFrame(() => {
          frame = 0;
          this.follow(() => view.show(true));
        });
      }
      answer.note = noteOf(last);
      say("Answered", false);
    } catch (error) {
      if (signal.aborted) {
        answer.note = "stopped";
        say("Stopped");
      } else {
        answer.error = error instanceof Refused ? error.message : `The answer broke off: ${error}`;
        if (error instanceof Refused) this.around.refused(error);
      }
    }
    cancelAnimationFrame(frame);
    this.follow(() => view.show(false));
  }

  /**
   * Keeps scrolled to the bottom, if it was there.
   * @param {() => void} grow
   */
  follow(grow) {
    const { log } = this;
    const below = log.scrollHeight - log.scrollTop - log.clientHeight;
    grow();
    if (below < 80) log.scrollTop = log.scrollHeight;
  }
}

/** @param {import("./api.js").Piece} last the last chunk, with usage and timings */
function noteOf({ reason, usage, timings }) {
  const parts = [];
  if (usage) parts.push(`${usage.completion_tokens} tokens`);
  if (timings) parts.push(`${timings.predicted_per_second.toFixed(1)} tokens/s`);
  if (timings) parts.push(`prompt ${(timings.prompt_ms / 1000).toFixed(2)} s`);
  if (reason === "length") parts.push("cut: its limit is reached");
  return parts.join(" · ");
}
