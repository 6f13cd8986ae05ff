/** What an empty conversation shows: the model, some questions, the keys. */

import { el } from "./dom.js";

const QUESTIONS = [
  "Explain in three sentences how a transformer predicts the next token.",
  "Write a Python function that finds the longest palindrome in a text.",
  "Derive the formula for the roots of a quadratic equation.",
];

/** @type {[number, string][]} */
const COUNTS = [
  [1e9, "billion"],
  [1e6, "million"],
  [1e3, "thousand"],
];
/** @type {[number, string][]} */
const BYTES = [
  [1e9, "GB"],
  [1e6, "MB"],
  [1e3, "kB"],
];

/**
 * @param {import("./api.js").Model | undefined} model
 * @param {(question: string) => void} chosen
 */
export function welcome(model, chosen) {
  const questions = QUESTIONS.map((question) =>
    el("li", {}, el("button", { type: "button", click: () => chosen(question) }, question)),
  );
  return el(
    "div",
    { class: "empty" },
    el("h2", {}, model?.id ?? "jinfer"),
    el("p", {}, model ? factsOf(model).join(" · ") : ""),
    el("ul", { "aria-label": "Examples" }, ...questions),
    el(
      "p",
      {},
      "Enter sends, Shift+Enter begins a new line, Esc stops. Images and files of text can be dropped here.",
    ),
  );
}

/**
 * What is known of a model.
 * @param {import("./api.js").Model} model
 */
export function factsOf({ max_model_len: context, meta }) {
  return [
    meta?.n_params ? `${short(meta.n_params, COUNTS)} parameters` : "",
    meta?.size ? short(meta.size, BYTES) : "",
    context ? `context of ${context.toLocaleString("en")} tokens` : "",
  ].filter(Boolean);
}

/**
 * A large number in words of thousands.
 * @param {number} value
 * @param {[number, string][]} units largest first
 */
function short(value, units) {
  const [size, unit] = units.find(([least]) => value >= least) ?? [1, ""];
  const scaled = value / size;
  return `${scaled < 10 ? scaled.toFixed(1) : Math.round(scaled)}\u00a0${unit}`;
}
