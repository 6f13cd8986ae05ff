/** Conversations in the browser's IndexedDB; without it they live as long as the page. */

/** @typedef {import("./tree.js").Conversation} Conversation */

const NAME = "jinfer";
const STORE = "conversations";

export class Database {
  constructor() {
    /** @type {IDBDatabase | null} */
    this.opened = null;
  }

  /**
   * Opens it.
   * @returns {Promise<Conversation[]>} all that is kept
   */
  async open() {
    try {
      const opening = indexedDB.open(NAME, 1);
      opening.onupgradeneeded = () => opening.result.createObjectStore(STORE, { keyPath: "id" });
      this.opened = await done(opening);
      return await this.all();
    } catch {
      return []; // a browser may deny it
    }
  }

  /** @returns {Promise<Conversation[]>} */
  async all() {
    if (!this.opened) return [];
    return done(this.opened.transaction(STORE).objectStore(STORE).getAll());
  }

  /**
   * Writes conversations, all of them or none.
   * @param {Conversation[]} conversations
   * @returns {Promise<boolean>} false if the storage is full
   */
  put(conversations) {
    return this.write((store) => conversations.forEach((one) => store.put(one)));
  }

  /** @param {Conversation} one */
  remove({ id }) {
    return this.write((store) => store.delete(id));
  }

  clear() {
    return this.write((store) => store.clear());
  }

  /**
   * @param {(store: IDBObjectStore) => void} change
   * @returns {Promise<boolean>} whether it is written
   */
  write(change) {
    const { opened } = this;
    if (!opened) return Promise.resolve(true);
    return new Promise((resolve) => {
      const transaction = opened.transaction(STORE, "readwrite");
      transaction.oncomplete = () => resolve(true);
      transaction.onabort = () => resolve(false);
      change(transaction.objectStore(STORE));
      transaction.commit(); // at once: the page may be closed
    });
  }
}

/**
 * @template T
 * @param {IDBRequest<T>} request
 * @returns {Promise<T>}
 */
function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
