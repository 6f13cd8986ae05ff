/** Messages as requests have them. */

import { withFiles } from "./attachments.js";

/**
 * @typedef {import("./tree.js").Message} Message
 * @typedef {import("./api.js").Turn} Turn
 */

/**
 * @param {Message[]} messages of a branch
 * @param {string} system the system prompt
 * @returns {Turn[]}
 */
export function turnsOf(messages, system) {
  const asked = messages.findLastIndex((one) => one.role === "user");
  // What was thought counts until the user speaks again: between calls of tools, and to continue.
  const turns = messages.flatMap((one, n) => turnOf(one, n > asked));
  return system.trim() ? [{ role: "system", content: system }, ...turns] : turns;
}

/**
 * @param {Message} message
 * @param {boolean} thinking whether its reasoning is sent
 * @returns {Turn[]}
 */
function turnOf({ role, content, files, reasoning, calls, results }, thinking) {
  if (results) {
    return results.map((one) => ({ role: "tool", tool_call_id: one.id, content: one.content }));
  }
  /** @type {Turn} */
  const turn = { role, content: withFiles(content, files ?? []) };
  if (thinking && reasoning) turn.reasoning_content = reasoning;
  if (calls?.length) {
    turn.tool_calls = calls.map(({ id, name, arguments: written }) => ({
      id,
      type: "function",
      function: { name, arguments: written },
    }));
  }
  return [turn];
}
