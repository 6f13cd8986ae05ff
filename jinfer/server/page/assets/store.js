/** Browser storage: settings in localStorage, the API key in sessionStorage. */

const PREFIX = "jinfer.";

/**
 * A named persistent value; without storage it lives as long as the page.
 * @template T
 */
class StoredValue {
  /**
   * @param {() => Storage} storage called late, because a browser may deny it
   * @param {string} name
   * @param {T} otherwise the default
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
      // An unreadable value counts as missing.
    }
  }

  /**
   * @param {T} value
   * @returns {boolean} whether it was stored; false if the storage is full
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

  remove() {
    try {
      this.storage().removeItem(this.name);
    } catch {
      // Nothing was stored.
    }
  }
}

/**
 * @template T
 * @param {string} name
 * @param {T} otherwise
 */
export const stored = (name, otherwise) => new StoredValue(() => localStorage, name, otherwise);

/** The API key. */
export const key = new StoredValue(() => sessionStorage, "key", "");
