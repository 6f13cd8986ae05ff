/** An answer as it comes: read from the server into a message, and drawn as it grows. */

import { chat, Refused } from "./api.js";
import { Redraw } from "./redraw.js";
import { say } from "./status.js";
import { collect } from "./tools.js";

/**
 * Reads an answer until it ends, breaks off or is stopped.
 * @param {{messages: import("./api.js").Turn[]}} asked
 * @param {import("./tree.js").Message} answer
 * @param {() => void} draw
 * @param {AbortSignal} signal
 * @returns {Promise<Refused | null>} the failed request
 */
export async function read(asked, answer, draw, signal) {
  /** @type {import("./api.js").Piece} */
  const last = {};
  const calls = answer.calls ?? [];
  const redraw = new Redraw(draw);
  try {
    for await (const piece of chat(asked, signal)) {
      answer.content += piece.content;
      if (piece.reasoning) answer.reasoning = (answer.reasoning ?? "") + piece.reasoning;
      if (piece.calls?.length) {
        collect(calls, piece.calls);
        answer.calls = calls;
      }
      for (const name of /** @type {const} */ (["reason", "usage", "timings"])) {
        if (piece[name]) Object.assign(last, { [name]: piece[name] });
      }
      redraw.request();
    }
    answer.note = noteOf(last);
    if (last.reason !== "length") delete answer.cut;
    if (last.usage) answer.used = last.usage.total_tokens;
    say("Answered", false);
    return null;
  } catch (error) {
    if (signal.aborted) {
      answer.note = "stopped";
      say("Stopped");
      return null;
    }
    if (error instanceof Refused) {
      answer.error = error.message;
      return error;
    }
    answer.error = `The answer broke off: ${error}`;
    return null;
  } finally {
    redraw.stop();
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
