/** Settings field, generated from its OpenAPI schema. */

import { el } from "./dom.js";

/**
 * @typedef {object} Schema of a field, from OpenAPI
 * @property {Schema[]} [anyOf]
 * @property {string} [type]
 * @property {unknown} [const]
 * @property {Schema} [items]
 * @property {any[]} [examples] possible values
 * @property {string} [description]
 * @property {number} [minimum]
 * @property {number} [exclusiveMinimum]
 * @property {number} [maximum]
 *
 * @typedef {object} Form how a value is shown and parsed
 * @property {HTMLInputElement | HTMLSelectElement | HTMLTextAreaElement} input
 * @property {(text: string) => unknown} read throws if it is invalid
 * @property {string} hint
 */

export class Field {
  /**
   * @param {string} name
   * @param {Schema} schema
   * @param {() => void} changed
   */
  constructor(name, schema, changed) {
    this.name = name;
    this.form = formOf(schema);
    const { input, hint } = this.form;
    const about = el(
      "small",
      { id: `about-${name}` },
      [schema.description?.replace(/\.$/, ""), hint].filter(Boolean).join(" · "),
    );
    input.id = `set-${name}`;
    input.setAttribute("name", name);
    input.setAttribute("aria-describedby", about.id);
    input.addEventListener("input", () => {
      this.check();
      changed();
    });
    this.element = el(
      "div",
      { class: "field" },
      el("label", { for: input.id }, ...breakable(name)),
      input,
      about,
    );
  }

  get text() {
    return this.form.input.value;
  }

  set text(text) {
    this.form.input.value = text;
    this.check();
  }

  /** The value to send; undefined: none. Throws if it is invalid. */
  get value() {
    const { input, read } = this.form;
    return input.value.trim() ? read(input.value) : undefined;
  }

  /** @param {unknown} value the default */
  set otherwise(value) {
    const shown =
      value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value);
    const { input } = this.form;
    if (input instanceof HTMLSelectElement)
      input.options[0].text = shown ? `(${shown})` : "(default)";
    else input.placeholder = shown;
  }

  check() {
    const { input } = this.form;
    input.setCustomValidity("");
    try {
      this.value;
    } catch (error) {
      input.setCustomValidity(/** @type {Error} */ (error).message);
    }
  }
}

/**
 * @param {Schema} schema
 * @returns {Form}
 */
function formOf(schema) {
  const kinds = (schema.anyOf ?? [schema]).filter((one) => one.type !== "null");
  const types = kinds.map((one) => one.type);
  const number = kinds.find((one) => one.type === "number" || one.type === "integer");
  const lines = kinds.find((one) => one.type === "array" && one.items?.type === "string");
  if (kinds.every((one) => one.type === "boolean" || one.const !== undefined)) {
    const words = kinds.flatMap((one) => (one.const === undefined ? [] : [String(one.const)]));
    return select(["true", "false", ...words], (text) =>
      words.includes(text) ? text : text === "true",
    );
  }
  if (number && kinds.length === 1) return numeric(number);
  if (lines) {
    const hint = ["one a line, \\n for a new line", ...(schema.examples?.[0] ?? [])].join(" ");
    const read = (/** @type {string} */ text) =>
      text
        .split("\n")
        .filter(Boolean)
        .map((line) => line.replaceAll("\\n", "\n"));
    return { input: el("textarea", { rows: 1 }), read, hint };
  }
  if (types.includes("string")) {
    if (schema.examples) return select(schema.examples, (text) => text);
    return { input: el("textarea", { rows: 1 }), read: (text) => text, hint: "" };
  }
  return { input: el("textarea", { rows: 1 }), read: parsed, hint: "as JSON" };
}

/**
 * @param {string[]} words
 * @param {(text: string) => unknown} read
 * @returns {Form}
 */
function select(words, read) {
  const options = words.map((word) => el("option", { value: word }, word));
  return {
    input: el("select", {}, el("option", { value: "" }, "(default)"), ...options),
    read,
    hint: "",
  };
}

/**
 * @param {Schema} schema
 * @returns {Form}
 */
function numeric({ type, minimum, exclusiveMinimum, maximum }) {
  const whole = type === "integer";
  const input = el("input", {
    type: "number",
    step: whole ? 1 : "any",
    inputmode: whole ? "numeric" : "decimal",
  });
  const least = minimum ?? exclusiveMinimum;
  const most = Math.min(maximum ?? Infinity, Number.MAX_SAFE_INTEGER);
  if (least !== undefined) input.min = String(least);
  input.max = String(most);
  const from = exclusiveMinimum === undefined ? minimum : `above ${exclusiveMinimum}`;
  const hint = from === undefined ? "" : most < 2 ** 31 - 1 ? `${from} to ${most}` : `from ${from}`;
  /** @param {string} text */
  const read = (text) => {
    const value = Number(text);
    if (exclusiveMinimum !== undefined && value <= exclusiveMinimum)
      throw new Error(`above ${exclusiveMinimum}`);
    return value;
  };
  return { input, read, hint };
}

/** @param {string} name which may be broken after each of its words */
const breakable = (name) =>
  name.split(/(?<=_)/).flatMap((word, n) => (n ? [el("wbr"), word] : [word]));

/** @param {string} text */
function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new Error("this is not JSON");
  }
}
