/** Formulas: TeX becomes MathML by Temml, which is loaded with the first one. */

import { el } from "./dom.js";
import { nodesOf } from "./markup.js";

const LONGEST = 5000; // characters of a formula; longer ones are shown as they are written
const MATHML = {
  namespace: "http://www.w3.org/1998/Math/MathML",
  // A span, which is of no other namespace here, is where an equation's number would be.
  elements: new Set(
    (
      "math span mrow mi mn mo ms mtext mspace msup msub msubsup mfrac msqrt mroot mover munder " +
      "munderover mmultiscripts mprescripts mtable mtr mtd mpadded mphantom menclose mstyle none"
    ).split(" "),
  ),
  attributes: new Set(
    (
      "accent class columnalign depth display displaystyle fence form height largeop linebreak " +
      "linethickness lspace mathbackground mathsize mathvariant maxsize minsize movablelimits " +
      "notation rowspacing rspace scriptlevel separator stretchy symmetric voffset width"
    ).split(" "),
  ),
  properties: new Set(
    (
      "padding padding-left padding-right padding-top padding-bottom border border-left " +
      "border-right border-top border-bottom color display font-weight left math-depth " +
      "math-style text-align width"
    ).split(" "),
  ),
};
// Nothing that a formula names is loaded or linked; sizes are those of a text.
const OPTIONS = {
  throwOnError: true,
  trust: false,
  maxSize: [40, 20],
  maxExpand: 500,
  strict: false,
};

/** @type {{renderToString: (tex: string, options: object) => string} | null} */
let library = null;
/** @type {Promise<void> | null} */
let loading = null;

/**
 * A formula; until the library is there, and where it is none, its text.
 * @param {string} source as it is written, with its delimiters
 * @param {string} tex
 * @param {boolean} display whether it has lines of its own
 * @returns {HTMLElement}
 */
export function formula(source, tex, display) {
  const place = el("span", { class: display ? "formula display" : "formula" }, source);
  if (tex.length > LONGEST) return place;
  if (library) draw(place, tex, display);
  else
    loaded().then(
      () => draw(place, tex, display),
      () => {},
    );
  return place;
}

/** Loads the library; a later formula tries again if that failed. */
function loaded() {
  loading ??= import(/** @type {any} */ ("./temml.min.js"))
    .then((module) => {
      library = module.default;
    })
    .finally(() => (loading = null));
  return loading;
}

/**
 * @param {HTMLElement} place
 * @param {string} tex
 * @param {boolean} display
 */
function draw(place, tex, display) {
  try {
    const markup = library?.renderToString(tex, { ...OPTIONS, displayMode: display }) ?? "";
    const nodes = nodesOf(markup, MATHML);
    nodes.firstElementChild?.setAttribute("alttext", tex);
    place.replaceChildren(nodes);
  } catch {
    place.classList.add("failed"); // the source stays
  }
  if (display && !place.classList.contains("failed")) place.tabIndex = 0; // its overflow scrolls
}
