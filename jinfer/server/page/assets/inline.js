/** Inline Markdown: emphasis, code, links, formulas. Everything else, including HTML, is text. */

import { el } from "./dom.js";
import { formula } from "./formula.js";

// [label](target "title"), or with ! before it; a target may contain a pair of parentheses.
const LABEL = String.raw`!?\[([^[\]]{0,1000})\]`;
const TARGET = String.raw`<?([^()\s<>]{0,2000}(?:\([^()\s]{0,200}\)[^()\s<>]{0,200})?)>?`;
const TITLE = String.raw`(?:\s{1,9}"[^"]{0,500}")?`;
const LINK = new RegExp(String.raw`${LABEL}\(\s{0,9}${TARGET}${TITLE}\s{0,9}\)`, "y");

// Patterns are bounded, so that no text takes long. Each is tried at its delimiters only.
const SIGNS = /[\\$`*_~[!<h]/g;
const RULES = /** @type {[RegExp, (found: RegExpExecArray) => Node | string][]} */ ([
  [/\\\(([^]{1,2000}?)\\\)/y, (found) => formula(found[0], found[1], false)],
  [/\\\[([^]{1,2000}?)\\\]/y, (found) => formula(found[0], found[1], true)],
  [/\$\$([^$]{1,2000})\$\$/y, (found) => formula(found[0], found[1], true)],
  // As Pandoc has it, so that amounts of money are none.
  [
    /(?<![\w$\\])\$(?=[^\s$])((?:[^$\\\n]|\\[^\n]){0,999}(?:[^$\\\s]|\\[^\s]))\$(?![\w$])/y,
    (found) => formula(found[0], found[1], false),
  ],
  [/\\([!-/:-@[-`{-~])/y, (found) => found[1]],
  [/(`+)(?!`)([^]{0,2000}?[^`])\1(?!`)/y, (found) => el("code", {}, unpadded(found[2]))],
  [LINK, (found) => link(found[2], inline(found[1]), found[0])],
  [/<(https?:\/\/[^\s<>]{1,2000})>/y, (found) => link(found[1], [found[1]], found[0])],
  [
    /https?:\/\/[^\s<>"`]{0,2000}[^\s<>"`.,;:!?)\]*_~']/y,
    (found) => link(found[0], [found[0]], found[0]),
  ],
  [/\*\*(?=\S)([^]{0,1000}?\S)\*\*(?!\*)/y, (found) => el("strong", {}, ...inline(found[1]))],
  [/(?<!\w)__(?=\S)([^]{0,1000}?\S)__(?!\w)/y, (found) => el("strong", {}, ...inline(found[1]))],
  [/\*(?=[^\s*])([^*]{0,1000}[^\s*])\*/y, (found) => el("em", {}, ...inline(found[1]))],
  [/(?<!\w)_(?=[^\s_])([^_]{0,1000}[^\s_])_(?!\w)/y, (found) => el("em", {}, ...inline(found[1]))],
  [/\*(\S)\*|(?<!\w)_(\S)_(?!\w)/y, (found) => el("em", {}, found[1] ?? found[2])],
  [/~~(?=\S)([^]{0,1000}?\S)~~/y, (found) => el("del", {}, ...inline(found[1]))],
]);

/**
 * The nodes of a text.
 * @param {string} text
 * @returns {(Node | string)[]}
 */
export function inline(text) {
  /** @type {(Node | string)[]} */
  const nodes = [];
  let plain = 0;
  SIGNS.lastIndex = 0;
  for (let sign; (sign = SIGNS.exec(text));) {
    const at = sign.index;
    const matched = first(text, at);
    if (!matched) continue;
    const [found, make] = matched;
    if (at > plain) nodes.push(text.slice(plain, at));
    nodes.push(make(found));
    plain = SIGNS.lastIndex = at + found[0].length;
  }
  if (plain < text.length) nodes.push(text.slice(plain));
  return nodes;
}

/**
 * The first rule that matches at an index.
 * @param {string} text
 * @param {number} at
 */
function first(text, at) {
  for (const [pattern, make] of RULES) {
    pattern.lastIndex = at;
    const found = pattern.exec(text);
    if (found) return /** @type {const} */ ([found, make]);
  }
  return null;
}

/** @param {string} code of which a space at both ends only keeps the signs apart */
const unpadded = (code) => code.replace(/^ ([^]*[^ ][^]*) $/, "$1");

/**
 * A link to the web or a mail address; other targets stay text.
 * @param {string} target
 * @param {(Node | string)[]} label
 * @param {string} written
 */
function link(target, label, written) {
  if (!/^(?:https?:\/\/|mailto:)/i.test(target) || !URL.canParse(target)) return written;
  const known = { href: target, target: "_blank", rel: "noopener noreferrer nofollow" };
  return el("a", known, ...(label.length ? label : [target]));
}
