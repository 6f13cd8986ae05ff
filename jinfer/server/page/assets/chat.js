/** Chat view: the messages of a branch, and the answer that is being streamed. */

import { MessageView } from "./message.js";
import { read } from "./stream.js";
import { add, branch, select, siblings } from "./tree.js";
import { turnsOf } from "./turns.js";

const SAVED = 3000; // milliseconds between savings while an answer grows

/**
 * @typedef {import("./tree.js").Message} Message
 * @typedef {import("./api.js").Turn} Turn
 *
 * @typedef {object} Around
 * @property {import("./conversations.js").Conversations} conversations
 * @property {() => Record<string, unknown> | null} asked the fields of each request; null: invalid settings
 * @property {() => string} system the system prompt
 * @property {() => Node} welcome what an empty conversation shows
 * @property {() => void} changed called when messages change
 * @property {(error: import("./api.js").Refused) => void} refused called with a failed request
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
    /** @type {Map<string, MessageView>} of the conversation, by the messages' ids */
    this.views = new Map();
  }

  get conversation() {
    return this.around.conversations.current;
  }

  /** Shows the current conversation; cancels an answer in another one. */
  open() {
    this.stop();
    this.views.clear();
    this.arrange();
    this.log.scrollTop = this.log.scrollHeight;
  }

  /** Shows the messages of the branch. */
  arrange() {
    const { conversation } = this;
    const messages = branch(conversation);
    const shown = messages.map((one, n) => {
      const versions = siblings(conversation, one);
      const view = this.view(one);
      view.arrange({
        at: versions.indexOf(one),
        of: versions.length,
        last: n === messages.length - 1,
        before: messages.slice(0, n),
      });
      return view.element;
    });
    this.log.replaceChildren(...(shown.length ? shown : [this.around.welcome()]));
  }

  /** @param {Message} message */
  view(message) {
    const known = this.views.get(message.id);
    if (known) return known;
    const view = new MessageView(message, {
      resend: (one, content) =>
        this.ask(one.parent, { role: "user", content, ...(one.files && { files: one.files }) }),
      rewrite: (one, content) => this.rewrite(one, content),
      regenerate: (one) => this.answerTo(one.parent),
      goOn: (one) => this.goOn(one),
      returned: (one, results) => this.ask(one.id, { role: "tool", content: "", results }),
      step: (one, step) => this.step(one, step),
    });
    this.views.set(message.id, view);
    return view;
  }

  /**
   * @param {string} content
   * @param {{name: string, text: string}[]} files
   * @returns {boolean} whether it was sent
   */
  send(content, files) {
    return this.ask(this.conversation.leaf, {
      role: "user",
      content,
      ...(files.length && { files }),
    });
  }

  /**
   * Adds a message and requests the answer.
   * @param {string | null} parent
   * @param {Omit<Message, "id" | "parent">} message
   */
  ask(parent, message) {
    if (!this.around.asked()) return false;
    this.stop();
    return this.answerTo(add(this.conversation, parent, message).id);
  }

  /**
   * Requests an answer, beside those that are there.
   * @param {string | null} parent
   * @returns {boolean} whether it was requested
   */
  answerTo(parent) {
    const asked = this.around.asked();
    if (!asked) return false;
    this.stop();
    const turns = this.turns(parent);
    const answer = add(this.conversation, parent, { role: "assistant", content: "" });
    this.answer({ ...asked, messages: turns }, answer);
    return true;
  }

  /**
   * Continues an answer where it ends.
   * @param {Message} answer
   */
  goOn(answer) {
    const asked = this.around.asked();
    if (!asked) return;
    this.stop();
    const more = { continue_final_message: true, add_generation_prompt: false };
    for (const name of /** @type {const} */ (["error", "note"])) delete answer[name];
    this.answer({ ...asked, ...more, messages: this.turns(answer.id) }, answer);
  }

  /**
   * The messages of a branch as a request has them.
   * @param {string | null} end
   */
  turns(end) {
    return turnsOf(branch(this.conversation, end), this.around.system());
  }

  /**
   * Puts an answer that the user has written beside the model's.
   * @param {Message} answer
   * @param {string} content
   */
  rewrite({ parent, role, reasoning }, content) {
    this.stop();
    const added = { role, content, cut: true, note: "edited", ...(reasoning && { reasoning }) };
    add(this.conversation, parent, added);
    this.changed();
  }

  /**
   * Shows another version of a message.
   * @param {Message} message
   * @param {number} step
   */
  step(message, step) {
    this.stop();
    const versions = siblings(this.conversation, message);
    const other = versions[versions.indexOf(message) + step];
    if (!other) return;
    select(this.conversation, other);
    this.changed();
    const buttons = this.view(other).versions.querySelectorAll("button");
    const [back, forth] = step < 0 ? buttons : [...buttons].reverse();
    (back.disabled ? forth : back).focus();
  }

  /** Shows and saves what has changed. */
  changed() {
    this.arrange();
    this.around.conversations.save(this.conversation);
    this.around.changed();
  }

  /** Cancels the answer that is being streamed, here and on the server. */
  stop() {
    this.running?.abort();
    this.running = null;
  }

  /**
   * Streams an answer to the view, and saves it.
   * @param {{messages: Turn[]}} asked
   * @param {Message} answer
   */
  async answer(asked, answer) {
    const { conversations, changed } = this.around;
    const { conversation } = this;
    const running = (this.running = new AbortController());
    answer.cut = true; // until its end has come: the page may be closed
    const view = this.view(answer);
    view.show(true);
    this.arrange();
    this.log.setAttribute("aria-busy", "true");
    this.log.scrollTop = this.log.scrollHeight;
    conversations.save(conversation);
    changed();
    const saving = setInterval(() => conversations.write(conversation), SAVED);
    const draw = () => this.follow(() => view.show(true));
    const refused = await read(asked, answer, draw, running.signal);
    clearInterval(saving);
    this.follow(() => view.show(false));
    if (refused) this.around.refused(refused);
    if (conversations.all.includes(conversation)) await conversations.write(conversation);
    if (this.running !== running && this.running !== null) return;
    this.running = null;
    this.log.setAttribute("aria-busy", "false");
    changed();
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
