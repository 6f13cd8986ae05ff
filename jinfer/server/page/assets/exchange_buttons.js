/** Buttons that import conversations from files and export all of them. */

import { byId } from "./dom.js";
import { download, read } from "./exchange.js";
import { say } from "./status.js";

/**
 * @param {import("./conversations.js").Conversations} conversations
 * @param {() => void} opened called when another conversation is shown
 */
export function exchange(conversations, opened) {
  const chooser = /** @type {HTMLInputElement} */ (byId("import-file"));
  byId("import").addEventListener("click", () => chooser.click());
  byId("export").addEventListener("click", () => download(conversations.all, "conversations"));
  chooser.addEventListener("change", async () => {
    for (const file of chooser.files ?? []) await take(file);
    chooser.value = "";
  });

  /** @param {File} file */
  const take = async (file) => {
    try {
      const found = await read(file);
      const added = await conversations.import(found);
      if (added === null) return;
      say(`Imported ${added} of ${found.length}`);
      if (!added) return;
      conversations.open(
        conversations.all.find(({ id }) => id === found[0].id) ?? conversations.current,
      );
      opened();
    } catch (error) {
      say(`${file.name}: ${/** @type {Error} */ (error).message}`);
    }
  };
}
