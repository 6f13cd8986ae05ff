/** Conversations as files: exported, and imported after every part was checked. */

import { el } from "./dom.js";
import { newId } from "./tree.js";

/**
 * @typedef {import("./tree.js").Conversation} Conversation
 * @typedef {import("./tree.js").Message} Message
 */

const FORMAT = "jinfer-conversations";
const LARGEST = 64 << 20; // bytes of a file
const ROLES = ["user", "assistant", "tool"];

/**
 * Offers conversations as a file.
 * @param {Conversation[]} conversations
 * @param {string} title
 */
export function download(conversations, title) {
  const text = JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);
  const href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const name = title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "conversation";
  el("a", { href, download: `${name}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(href), 10_000);
}

/**
 * Reads a file of conversations. Throws if it is none.
 * @param {File} file
 * @returns {Promise<Conversation[]>}
 */
export async function read(file) {
  if (file.size > LARGEST) throw new Error(`it is larger than ${LARGEST >> 20} MiB`);
  let found;
  try {
    found = JSON.parse(await file.text());
  } catch {
    throw new Error("it is not JSON");
  }
  if (found?.format !== FORMAT || !Array.isArray(found.conversations))
    throw new Error("it has no conversations of this page");
  if (found.version !== 1) throw new Error("another version of this page has written it");
  return found.conversations.map((/** @type {unknown} */ one) => conversationOf(one));
}

/**
 * A conversation made of what a file or an earlier version of the page has. Throws if a part is wrong.
 * @param {unknown} raw
 * @returns {Conversation}
 */
export function conversationOf(raw) {
  const { id, title, updated, messages, leaf } = record(raw, "a conversation");
  if (!Array.isArray(messages)) throw new Error("a conversation has no messages");
  /** @type {Set<string | null>} */
  const ids = new Set([null]);
  /** @type {string | null} */
  let before = null;
  const made = messages.map((one) => {
    const message = messageOf(record(one, "a message"), before);
    if (!ids.has(message.parent)) throw new Error("a message follows none of those before it");
    if (ids.has(message.id)) throw new Error("two messages have the same id");
    ids.add((before = message.id));
    return message;
  });
  return {
    id: idOf(id),
    ...(typeof title === "string" && title ? { title: title.slice(0, 200) } : {}),
    updated: Number.isFinite(updated) ? updated : Date.now(),
    messages: made,
    leaf: leaf && ids.has(leaf) ? leaf : before,
  };
}

/** @param {unknown} raw */
const idOf = (raw) => (typeof raw === "string" && /^[\w-]{1,80}$/.test(raw) ? raw : newId());

/**
 * @param {Record<string, any>} raw
 * @param {string | null} before the message that it follows if it does not say
 * @returns {Message}
 */
function messageOf(raw, before) {
  if (!ROLES.includes(raw.role))
    throw new Error(`a message has none of the roles ${ROLES.join(", ")}`);
  const { role, parent = before } = raw;
  /** @type {Message} */
  const made = { id: idOf(raw.id), parent, role, content: text(raw.content, "content") };
  for (const name of /** @type {const} */ (["reasoning", "note", "error"]))
    if (raw[name] !== undefined) made[name] = text(raw[name], name);
  if (raw.files !== undefined) made.files = parts(raw.files, ["name", "text"], "files");
  if (raw.calls !== undefined) made.calls = parts(raw.calls, ["id", "name", "arguments"], "calls");
  if (raw.results !== undefined) made.results = parts(raw.results, ["id", "content"], "results");
  if (raw.cut === true) made.cut = true;
  if (Number.isSafeInteger(raw.used) && raw.used >= 0) made.used = raw.used;
  return made;
}

/**
 * @param {unknown} raw
 * @param {string[]} names of texts that each part has
 * @param {string} where
 * @returns {any[]}
 */
function parts(raw, names, where) {
  if (!Array.isArray(raw)) throw new Error(`${where} of a message are no list`);
  return raw.map((one) => {
    const found = record(one, `one of the ${where}`);
    return Object.fromEntries(names.map((name) => [name, text(found[name], `${where}: ${name}`)]));
  });
}

/**
 * @param {unknown} raw
 * @param {string} where
 */
function text(raw, where) {
  if (typeof raw !== "string") throw new Error(`${where} of a message is no text`);
  return raw;
}

/**
 * @param {unknown} raw
 * @param {string} what
 * @returns {Record<string, any>}
 */
function record(raw, what) {
  if (typeof raw !== "object" || raw === null || Array.isArray(raw))
    throw new Error(`${what} is no object`);
  return raw;
}
