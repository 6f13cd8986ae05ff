/** Markup that a library wrote, as nodes: named elements and attributes only, and never through HTML. */

const XHTML = "http://www.w3.org/1999/xhtml";
const DEEPEST = 150; // of elements in elements; layout of deeper ones may exhaust a browser's stack
const PIECE =
  /<\/([a-z]+)>|<([a-z]+)((?: [a-zA-Z:-]+="[^"<]*")*)>|&(lt|gt|amp|quot|#x27|nbsp);|([^<&]+)/y;
const ATTRIBUTE = / ([a-zA-Z:-]+)="([^"<]*)"/g;
/** @type {Record<string, string>} */
const SIGNS = { lt: "<", gt: ">", amp: "&", quot: '"', "#x27": "'", nbsp: "\u00a0" };

/**
 * @typedef {object} Allowed
 * @property {string} [namespace] of all elements
 * @property {Set<string>} elements
 * @property {Set<string>} attributes others are left out
 * @property {Set<string>} [properties] of style attributes; others are left out
 */

/**
 * Reads markup. Throws if it is not well-formed, too deep, or has an element that is not allowed.
 * @param {string} markup
 * @param {Allowed} allowed
 * @returns {DocumentFragment}
 */
export function nodesOf(markup, allowed) {
  const whole = document.createDocumentFragment();
  /** @type {Element[]} */
  const open = [];
  PIECE.lastIndex = 0;
  for (let at = 0; at < markup.length; at = PIECE.lastIndex) {
    const found = PIECE.exec(markup);
    if (!found) throw new Error(`no markup at ${at}`);
    const [, ends, begins, attributes, sign, text] = found;
    const place = open.at(-1) ?? whole;
    if (begins) {
      if (open.length >= DEEPEST) throw new Error("too deep");
      const made = element(begins, attributes, allowed);
      place.append(made);
      open.push(made);
    } else if (!ends) {
      place.append(text ?? SIGNS[sign]);
    } else if (open.pop()?.localName !== ends) {
      throw new Error(`</${ends}> ends nothing`);
    }
  }
  if (open.length) throw new Error("an element does not end");
  whole.normalize();
  return whole;
}

/**
 * @param {string} name
 * @param {string} written its attributes
 * @param {Allowed} allowed
 */
function element(name, written, { namespace = XHTML, elements, attributes, properties }) {
  if (!elements.has(name)) throw new Error(`<${name}> is not allowed`);
  const made = document.createElementNS(namespace, name);
  for (const [, attribute, value] of written.matchAll(ATTRIBUTE)) {
    const plain = value.replace(/&(lt|gt|amp|quot|#x27|nbsp);/g, (_, sign) => SIGNS[sign]);
    if (attribute === "style") dress(/** @type {HTMLElement} */ (made), plain, properties);
    else if (attributes.has(attribute)) made.setAttribute(attribute, plain);
  }
  return made;
}

/**
 * Sets properties one by one: the Content-Security-Policy forbids style attributes.
 * @param {HTMLElement} made
 * @param {string} style
 * @param {Set<string>} [properties]
 */
function dress(made, style, properties) {
  for (const one of style.split(";")) {
    const [name, value] = one.split(":", 2).map((part) => part.trim());
    if (value && properties?.has(name)) made.style.setProperty(name, value);
  }
}
