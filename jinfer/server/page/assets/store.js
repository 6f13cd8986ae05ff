/** What the browser keeps: conversations and settings for good, a key until its tab is closed. */

const PREFIX = "jinfer.";

/**
 * A named value that outlives the page; where the browser keeps nothing, it lives as long as that.
 * @template T
 */
class Kept {
  /**
   * @param {() => Storage} storage asked for late: a browser may refuse
   * @param {string} name
   * @param {T} otherwise where nothing is kept
   */
  constructor(storage, name, otherwise) {
    this.storage = storage;
    this.name = PREFIX + name;
    /** @type {T} */
    this.value = otherwise;
    try {
      const text = storage().getItem(this.name);
      if (text !== null) this.value = JSON.parse(text);
    } catch {
      // What cannot be read is as good as nothing.
    }
  }

  /**
   * @param {T} value
   * @returns {boolean} whether it is kept; it is not where there is no room
   */
  set(value) {
    this.value = value;
    try {
      this.storage().setItem(this.name, JSON.stringify(value));
      return true;
    } catch {
      return false;
    }
  }
}

/**
 * @template T
 * @param {string} name
 * @param {T} otherwise
 */
export const kept = (name, otherwise) => new Kept(() => localStorage, name, otherwise);

/** The key of a server that wants one. */
export const key = new Kept(() => sessionStorage, "key", "");
