/** DOM helpers: elements without HTML parsing, so that generated text can only become text. */

const SVG = "http://www.w3.org/2000/svg";

/** @typedef {string | Node | null | undefined | false} Child */
/** @typedef {Record<string, string | number | boolean | ((event: any) => void)>} Attributes */

/**
 * @template {Element} E
 * @param {E} made
 * @param {Attributes} attributes functions are listeners; true is an empty attribute, false none
 * @param {Child[]} children
 */
function dressed(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value !== false) made.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children) if (child || child === "") made.append(child);
  return made;
}

/**
 * Makes an HTML element.
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} name
 * @param {Attributes} [attributes]
 * @param {...Child} children
 * @returns {HTMLElementTagNameMap[K]}
 */
export function el(name, attributes = {}, ...children) {
  return dressed(document.createElement(name), attributes, children);
}

/**
 * Makes an SVG element.
 * @template {keyof SVGElementTagNameMap} K
 * @param {K} name
 * @param {Attributes} [attributes]
 * @param {...Child} children
 * @returns {SVGElementTagNameMap[K]}
 */
export function svg(name, attributes = {}, ...children) {
  const made = /** @type {SVGElementTagNameMap[K]} */ (document.createElementNS(SVG, name));
  return dressed(made, attributes, children);
}

/**
 * One of the symbols that index.html defines.
 * @param {string} name
 */
export function icon(name) {
  const use = svg("use", { href: `#icon-${name}` });
  return svg("svg", { class: "icon", "aria-hidden": "true" }, use);
}

/**
 * A button with a symbol and an accessible label.
 * @param {string} symbol
 * @param {string} label
 * @param {(event: MouseEvent) => void} pressed
 */
export function iconButton(symbol, label, pressed) {
  const known = { type: "button", class: "quiet", title: label, "aria-label": label };
  return el("button", { ...known, click: pressed }, icon(symbol));
}

/**
 * An element of the page, which must exist.
 * @param {string} id
 * @returns {any}
 */
export function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no #${id}`);
  return found;
}
