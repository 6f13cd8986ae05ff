/** Calls of functions as cards, with what they returned or a form for it. */

import { codeBlock } from "./code.js";
import { el } from "./dom.js";

/**
 * @typedef {import("./tree.js").Call} Call
 * @typedef {{id: string, content: string}} Result
 */

/**
 * Adds what a chunk of a stream has of calls.
 * @param {Call[]} calls
 * @param {import("./api.js").CallDelta[]} deltas
 */
export function collect(calls, deltas) {
  for (const { index, id, function: part } of deltas) {
    const call = (calls[index] ??= { id: "", name: "", arguments: "" });
    call.id ||= id ?? "";
    call.name += part?.name ?? "";
    call.arguments += part?.arguments ?? "";
  }
}

/**
 * A card of a call.
 * @param {Call} call
 * @param {boolean} growing whether more of its arguments may come
 * @param {...Node} more
 */
function card(call, growing, ...more) {
  const json = growing ? call.arguments : indented(call.arguments);
  const head = el("summary", {}, el("span", {}, call.name), el("small", {}, "function call"));
  return el(
    "details",
    { class: "card tool", open: true },
    head,
    codeBlock(json, "json", !growing),
    ...more,
  );
}

/**
 * Cards of an answer's calls.
 * @param {Call[]} calls
 * @param {boolean} growing
 */
export const callCards = (calls, growing) => calls.map((call) => card(call, growing));

/**
 * A form that asks what calls returned.
 * @param {Call[]} calls
 * @param {(results: Result[]) => void} send
 */
export function resultForm(calls, send) {
  const areas = calls.map((call) =>
    el("textarea", { rows: 2, "aria-label": `Result of ${call.name}`, placeholder: "Its result" }),
  );
  const shown = calls.map((call, n) => card(call, false, areas[n]));
  const submit = el("button", { type: "submit", class: "primary" }, "Send results");
  const form = el("form", { class: "results" }, ...shown, el("div", {}, submit));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(calls.map(({ id }, n) => ({ id, content: areas[n].value })));
  });
  return form;
}

/**
 * Cards of what calls returned.
 * @param {Result[]} results
 * @param {Call[]} calls
 */
export const resultCards = (results, calls) =>
  results.map(({ id, content }) => {
    const name = calls.find((call) => call.id === id)?.name ?? id;
    const head = el("summary", {}, el("span", {}, name), el("small", {}, "result"));
    const json = indented(content);
    return el(
      "details",
      { class: "card tool" },
      head,
      codeBlock(json, json === content ? "" : "json"),
    );
  });

/**
 * The tools that a text describes. Throws if it is no list of functions.
 * @param {string} text JSON
 * @returns {object[] | undefined} undefined: none
 */
export function toolsOf(text) {
  if (!text.trim()) return undefined;
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    throw new Error("this is not JSON");
  }
  if (!Array.isArray(found)) throw new Error("a list of functions is needed");
  // A bare function is one, too.
  return found.map((one) =>
    one && !one.type && one.name ? { type: "function", function: one } : one,
  );
}

/** @param {string} json as it is, if it is none */
function indented(json) {
  try {
    const found = JSON.parse(json);
    return typeof found === "object" ? JSON.stringify(found, null, 2) : json;
  } catch {
    return json;
  }
}
