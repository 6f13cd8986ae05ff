/** Blocks of Markdown that are formulas: between $$, \[ and \], or an environment's begin and end. */

import { formula } from "./formula.js";

const BEGIN = /^ {0,3}(\$\$|\\\[|\\begin\{((?:align|equation|gather|multline)\*?)\})/;

/**
 * The delimiters of the formula that a line begins with, if it begins with one.
 * @param {string} line
 */
export function opening(line) {
  const found = BEGIN.exec(line);
  if (!found) return null;
  const [, begin, environment] = found;
  const end = environment ? `\\end{${environment}}` : begin === "$$" ? "$$" : "\\]";
  return { begin, end, environment: Boolean(environment) };
}

/**
 * The line after a formula's end, or after its paragraph's: there are no empty lines in a formula.
 * @param {string[]} lines
 * @param {number} start
 * @param {{begin: string, end: string}} delimiters
 */
export function endOfFormula(lines, start, { begin, end }) {
  let from = lines[start].indexOf(begin) + begin.length;
  let at = start;
  for (; at < lines.length && lines[at].trim(); at += 1) {
    if (lines[at].includes(end, from)) return at + 1;
    from = 0;
  }
  return at;
}

/**
 * A block that is one formula and nothing else, or null.
 * @param {string} block
 */
export function displayed(block) {
  const written = block.trim();
  const delimiters = opening(written);
  if (!delimiters) return null;
  const { begin, end, environment } = delimiters;
  if (written.indexOf(end, begin.length) !== written.length - end.length) return null;
  const tex = environment ? written : written.slice(begin.length, -end.length);
  return tex.trim() ? formula(written, tex, true) : null;
}
