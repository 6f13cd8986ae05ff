/** Server-sent events (SSE): parses a response body. */

/**
 * The data of each event.
 * @param {ReadableStream<Uint8Array>} stream
 * @returns {AsyncGenerator<string>}
 */
export async function* events(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  /** @type {string[]} */
  let data = [];
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      const lines = (rest + decoder.decode(value, { stream: !done })).split(/\r?\n/);
      rest = done ? "" : /** @type {string} */ (lines.pop());
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
      if (done) break;
    }
    if (data.length) yield data.join("\n");
  } finally {
    reader.cancel().catch(() => {});
  }
}
