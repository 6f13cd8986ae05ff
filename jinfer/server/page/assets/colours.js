/** Syntax colours by highlight.js, in a worker that begins with the first code that has a language. */

import { nodesOf } from "./markup.js";

const LONGEST = 100_000; // characters; longer code stays as it is
const PATIENCE = 3000; // milliseconds for a piece of code; some patterns are slow on some texts
const SPANS = { elements: new Set(["span"]), attributes: new Set(["class"]) };

/** @typedef {{place: HTMLElement, code: string, language: string}} Job */

/** @type {Job[]} */
const waiting = [];
/** @type {Job | null} */
let current = null;
/** @type {Worker | null} */
let worker = null;
let ready = false;
let patience = 0;

/** The only script that may become a worker: the Content-Security-Policy allows one rule of this name. */
const rule = { createScriptURL: () => new URL("colour_worker.js", import.meta.url).href };
const policy = /** @type {any} */ (globalThis).trustedTypes?.createPolicy("colour-worker", rule);

/**
 * Colours code, soon.
 * @param {HTMLElement} place with the code as its text
 * @param {string} code
 * @param {string} language as a Markdown fence names it
 */
export function colour(place, code, language) {
  if (!/^[\w+#.-]{1,40}$/.test(language) || code.length > LONGEST) return;
  waiting.push({ place, code, language });
  if (!worker) begin();
  else if (ready && !current) next();
}

/** Starts the worker, which says when it is there. */
function begin() {
  worker = new Worker((policy ?? rule).createScriptURL(""), { type: "module" });
  current = null;
  ready = false;
  worker.onmessage = ({ data }) => {
    clearTimeout(patience);
    ready = true;
    if (current) draw(current, data);
    next();
  };
  worker.onerror = (event) => {
    event.preventDefault();
    end();
  };
}

/** Sends the next code to the worker. */
function next() {
  current = waiting.shift() ?? null;
  if (!current) return;
  patience = setTimeout(end, PATIENCE);
  worker?.postMessage({ code: current.code, language: current.language });
}

/** Ends the worker, and leaves what it was busy with as it is. */
function end() {
  clearTimeout(patience);
  worker?.terminate();
  worker = null;
  if (!ready) waiting.length = 0; // it could not even begin
  if (waiting.length) begin();
}

/**
 * @param {Job} job
 * @param {string} markup
 */
function draw({ place, code }, markup) {
  try {
    const nodes = nodesOf(markup, SPANS);
    if (nodes.textContent === code && place.textContent === code) place.replaceChildren(nodes);
  } catch {
    // It stays without colours.
  }
}
