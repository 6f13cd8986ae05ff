/** Conversations: those that the browser keeps, and the one that is shown. */

import { Database } from "./database.js";
import { conversationOf } from "./exchange.js";
import { notice } from "./status.js";
import { stored } from "./store.js";
import { fresh, newId } from "./tree.js";

/**
 * @typedef {import("./tree.js").Conversation} Conversation
 * @typedef {[before: string, found: string, after: string]} Around
 */

const LONGEST_TITLE = 60;
const BEFORE = 12; // characters before what is found
const AFTER = 60;

export class Conversations {
  constructor() {
    this.database = new Database();
    /** @type {Conversation[]} latest first, without empty ones */
    this.all = [];
    this.current = fresh();
  }

  /** Reads what is kept, in the order of time. */
  async load() {
    this.all = (await this.database.open()).sort(latestFirst);
    await this.adopt();
    this.current = this.all[0] ?? this.current;
  }

  /**
   * Reads again what another tab may have changed.
   * @returns {Promise<boolean>} whether the one that is shown has changed
   */
  async reload() {
    const { current } = this;
    const kept = await this.database.all();
    const found = kept.find(({ id }) => id === current.id);
    const same = !found || JSON.stringify(found) === JSON.stringify(current);
    this.all = kept.map((one) => (one === found && same ? current : one)).sort(latestFirst);
    if (found && !same) this.current = found;
    return !same;
  }

  /** Takes over what earlier versions of the page kept in localStorage. */
  async adopt() {
    const old = stored("conversations", /** @type {unknown[]} */ ([]));
    if (!Array.isArray(old.value) || !old.value.length) return;
    const now = Date.now();
    const found = old.value.flatMap((one, n) => {
      try {
        return [conversationOf({ .../** @type {object} */ (one), updated: now - n })];
      } catch {
        return [];
      }
    });
    if ((await this.import(found)) !== null) old.remove();
  }

  begin() {
    this.current = fresh();
  }

  /** @param {Conversation} one */
  open(one) {
    this.current = one;
  }

  /**
   * Saves one as the latest.
   * @param {Conversation} latest
   */
  save(latest) {
    latest.updated = Date.now();
    this.all = [latest, ...this.all.filter((one) => one !== latest)];
    return this.write(latest);
  }

  /**
   * @param {Conversation} one
   * @param {string} title empty: its first words
   */
  rename(one, title) {
    one.title = title.trim() || undefined;
    return this.write(one);
  }

  /**
   * Writes some; says so if the storage is full.
   * @param {...Conversation} some
   */
  async write(...some) {
    const written = await this.database.put(some);
    if (!written)
      notice("The browser's storage is full: export conversations, then delete some of them.");
    return written;
  }

  /**
   * Adds conversations, without those that are here already.
   * @param {Conversation[]} imported
   * @returns {Promise<number | null>} how many were added; null: the storage is full
   */
  async import(imported) {
    const known = new Map(this.all.map((one) => [one.id, contents(one)]));
    const added = imported
      .filter((one) => known.get(one.id) !== contents(one))
      .map((one) => (known.has(one.id) ? { ...one, id: newId() } : one));
    if (!(await this.write(...added))) return null;
    this.all = [...added, ...this.all].sort(latestFirst);
    return added.length;
  }

  /** @param {Conversation} one */
  remove(one) {
    this.all = this.all.filter((other) => other !== one);
    if (one === this.current) this.current = this.all[0] ?? fresh();
    return this.database.remove(one);
  }

  clear() {
    this.all = [];
    this.begin();
    return this.database.clear();
  }

  /**
   * The conversations in which all words occur, with the text around the first one.
   * @param {string} sought
   * @returns {{one: Conversation, around: Around | null}[]}
   */
  search(sought) {
    const words = sought.toLowerCase().split(/\s+/).filter(Boolean);
    /** @param {Conversation} one @returns {{one: Conversation, around: Around | null}[]} */
    const found = (one) => {
      if (!words.length) return [{ one, around: null }];
      const texts = [titleOf(one), ...one.messages.map(({ content }) => content)];
      const low = texts.map((text) => text.toLowerCase());
      if (!words.every((word) => low.some((text) => text.includes(word)))) return [];
      const at = low.findIndex((text, n) => n > 0 && text.includes(words[0]));
      if (at < 0) return [{ one, around: null }];
      const from = low[at].indexOf(words[0]);
      return [{ one, around: cutAround(texts[at], from, from + words[0].length) }];
    };
    return this.all.flatMap(found);
  }
}

/**
 * @param {Conversation} one
 * @param {Conversation} other
 */
const latestFirst = (one, other) => other.updated - one.updated;

/**
 * What two have in common that are the same.
 * @param {Conversation} one
 */
const contents = (one) => JSON.stringify(conversationOf(one).messages);

/** @param {Conversation} one */
export function titleOf(one) {
  const words = one.title ?? one.messages[0]?.content.trim().replace(/\s+/g, " ");
  const named = words || one.messages[0]?.files?.[0]?.name || "New chat";
  return named.length > LONGEST_TITLE ? `${named.slice(0, LONGEST_TITLE)}…` : named;
}

/**
 * @param {string} text
 * @param {number} from
 * @param {number} to
 * @returns {Around}
 */
function cutAround(text, from, to) {
  const begin = Math.max(0, from - BEFORE);
  const parts = [text.slice(begin, from), text.slice(from, to), text.slice(to, to + AFTER)];
  const [before, found, after] = parts.map((part) => part.replace(/\s+/g, " "));
  return [`${begin ? "…" : ""}${before}`, found, after];
}
