/** Conversations saved in the browser's storage. */

import { stored } from "./store.js";

/**
 * @typedef {object} Message
 * @property {"user" | "assistant"} role
 * @property {string} content
 * @property {string} [reasoning] the model's reasoning
 * @property {string} [note] usage, timings and finish reason
 * @property {string} [error] why the answer is incomplete
 *
 * @typedef {object} Conversation
 * @property {string} id
 * @property {Message[]} messages
 */

const LONGEST_TITLE = 60;

export class Conversations {
  constructor() {
    this.stored = stored("conversations", /** @type {Conversation[]} */ ([]));
    /** @type {Conversation} */
    this.current = this.all[0] ?? fresh();
  }

  /** Latest first, without empty ones. */
  get all() {
    return this.stored.value;
  }

  begin() {
    this.current = fresh();
  }

  /** @param {Conversation} one */
  open(one) {
    this.current = one;
  }

  /**
   * Saves one as the latest; removes the oldest if the storage is full.
   * @param {Conversation} latest
   */
  save(latest) {
    let all = [latest, ...this.all.filter((one) => one !== latest)];
    while (!this.stored.set(all) && all.length > 1) all = all.slice(0, -1);
  }

  /** @param {Conversation} one */
  remove(one) {
    this.stored.set(this.all.filter((other) => other !== one));
    if (one === this.current) this.current = this.all[0] ?? fresh();
  }

  clear() {
    this.stored.set([]);
    this.begin();
  }
}

/** @param {Conversation} one */
export function titleOf(one) {
  const words = one.messages[0]?.content.trim().replace(/\s+/g, " ") || "New chat";
  return words.length > LONGEST_TITLE ? `${words.slice(0, LONGEST_TITLE)}…` : words;
}

/** @returns {Conversation} */
function fresh() {
  return { id: `${Date.now()}-${Math.random().toString(36).slice(2)}`, messages: [] };
}
