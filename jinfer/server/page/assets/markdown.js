/** Markdown blocks: splits a text into independent blocks and renders each to a node. */

import { codeBlock } from "./code.js";
import { el } from "./dom.js";
import { displayed, endOfFormula, opening } from "./formula_block.js";
import { inline } from "./inline.js";

const FENCE = /^ {0,3}(`{3,}|~{3,}(?!~))([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s(.*))?$/;
const RULE = /^ {0,3}(?:(?:\* *){3,}|(?:- *){3,}|(?:_ *){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +|$)/;
const DIVIDER = /^ *\|?(?: *:?-+:? *\|)+(?: *:?-+:? *)?\|? *$/;
const DEEPEST = 8; // of blocks in blocks; what is deeper is text

/** @typedef {{start: number, text: string}} Block and where in the text it begins */

/**
 * Splits a text, whose lines end with \n, into blocks. While it grows, all but the last two are stable.
 * @param {string} text
 * @param {number} [from] the start of a block
 * @returns {Block[]}
 */
export function split(text, from = 0) {
  /** @type {Block[]} */
  const found = [];
  const lines = text.slice(from).split("\n");
  let start = from;
  for (let at = 0; at < lines.length;) {
    const end = lines[at].trim() ? endOf(lines, at) : at + 1;
    const block = lines.slice(at, end).join("\n");
    if (lines[at].trim()) found.push({ start, text: block });
    start += block.length + 1;
    at = end;
  }
  return found;
}

/**
 * The blocks of a text.
 * @param {string} text
 */
export const blocks = (text) => split(text.replace(/\r\n?/g, "\n")).map((block) => block.text);

/**
 * Whether a block is code of which more may come: all that is appended to it is code.
 * @param {string} block
 */
export function isOpenCode(block) {
  const lines = block.split("\n", 2);
  const fence = lines.length > 1 && FENCE.exec(lines[0]);
  if (!fence) return false;
  const last = block.slice(block.lastIndexOf("\n") + 1);
  return !/^ {0,3}[`~]/.test(last);
}

/**
 * The end of the block that begins at a line.
 * @param {string[]} lines
 * @param {number} start
 */
function endOf(lines, start) {
  const fence = FENCE.exec(lines[start]);
  let at = start + 1;
  if (fence) {
    const end = closing(fence[1]);
    while (at < lines.length && !end.test(lines[at])) at += 1;
    return Math.min(at + 1, lines.length);
  }
  if (HEADING.test(lines[start]) || RULE.test(lines[start])) return at;
  const delimiters = opening(lines[start]);
  if (delimiters) return endOfFormula(lines, start, delimiters);
  if (ITEM.test(lines[start])) return endOfList(lines, start);
  const quoted = QUOTE.test(lines[start]);
  while (at < lines.length && lines[at].trim() && QUOTE.test(lines[at]) === quoted) {
    if (!quoted && (begins(lines[at]) || ITEM.test(lines[at]))) break;
    at += 1;
  }
  return at;
}

/** @param {string} line */
const begins = (line) =>
  FENCE.test(line) || HEADING.test(line) || RULE.test(line) || opening(line) !== null;

/** @param {string} fence that begins code */
const closing = (fence) => new RegExp(`^ {0,3}${fence[0]}{${Math.min(fence.length, 999)},}\\s*$`);

/** @param {RegExpExecArray} item */
const ordered = (item) => /\d/.test(item[2]);

/**
 * A list continues over empty lines if items or indented lines follow.
 * @param {string[]} lines
 * @param {number} start
 */
function endOfList(lines, start) {
  const first = /** @type {RegExpExecArray} */ (ITEM.exec(lines[start]));
  /** @param {RegExpExecArray} item */
  const nested = (item) => item[1].length > first[1].length + 1;
  let end = start + 1;
  for (let at = end; at < lines.length; at += 1) {
    const line = lines[at];
    if (!line.trim()) continue;
    const item = RULE.test(line) ? null : ITEM.exec(line);
    const inside = item ? nested(item) || ordered(item) === ordered(first) : /^\s{2,}/.test(line);
    const lazy = !item && lines[at - 1].trim() && !begins(line) && !QUOTE.test(line);
    if (!inside && !lazy) break;
    end = at + 1;
  }
  return end;
}

/**
 * Renders a block.
 * @param {string} block
 * @param {boolean} [growing] whether more may come
 * @param {number} [depth] of blocks around it
 * @returns {HTMLElement}
 */
export function render(block, growing = false, depth = 0) {
  const lines = block.split("\n");
  const fence = FENCE.exec(lines[0]);
  if (fence) {
    const closed = lines.length > 1 && closing(fence[1]).test(/** @type {string} */ (lines.at(-1)));
    const [language] = fence[2].trim().split(/\s/, 1);
    const code = lines.slice(1, closed ? -1 : undefined).join("\n");
    return codeBlock(code, language, closed || !growing);
  }
  const heading = HEADING.exec(lines[0]);
  if (heading) {
    // The page's own headings come first.
    const level = Math.min(heading[1].length + 2, 6);
    const words = (heading[2] ?? "")
      .trim()
      .replace(/(?:^|\s)#+$/, "")
      .trim();
    return el(/** @type {"h3"} */ (`h${level}`), {}, ...inline(words));
  }
  if (RULE.test(lines[0])) return el("hr");
  if (depth < DEEPEST && QUOTE.test(lines[0])) {
    const inner = lines.map((line) => line.replace(QUOTE, "")).join("\n");
    return el("blockquote", {}, ...inside(inner, growing, depth));
  }
  if (depth < DEEPEST && ITEM.test(lines[0])) return list(lines, growing, depth);
  const shown = displayed(block);
  if (shown) return shown;
  if (lines.length > 1 && lines[0].includes("|") && DIVIDER.test(lines[1])) return table(lines);
  return el("p", {}, ...broken(lines));
}

/**
 * The blocks in a block, of which the last may grow.
 * @param {string} text
 * @param {boolean} growing
 * @param {number} depth
 */
const inside = (text, growing, depth) =>
  blocks(text).map((one, n, all) => render(one, growing && n === all.length - 1, depth + 1));

/**
 * Lines separated by breaks: models intend their line ends.
 * @param {string[]} lines
 */
function broken(lines) {
  const nodes = inline(lines.map((line) => line.trim().replace(/(?<!\\)\\$/, "")).join("\n"));
  return nodes.flatMap((node) => (typeof node === "string" ? withBreaks(node) : [node]));
}

/**
 * @param {string} text
 * @returns {(Node | string)[]}
 */
const withBreaks = (text) => text.split("\n").flatMap((part, n) => (n ? [el("br"), part] : [part]));

/**
 * @param {string[]} lines
 * @param {boolean} growing
 * @param {number} depth
 */
function list(lines, growing, depth) {
  const first = /** @type {RegExpExecArray} */ (ITEM.exec(lines[0]));
  /** @type {string[][]} */
  const items = [];
  for (const line of lines) {
    const found = ITEM.exec(line);
    const own = found && found[1].length <= first[1].length + 1 && !RULE.test(line);
    if (own || !items.length) items.push([line.slice(found?.[0].length ?? 0)]);
    else /** @type {string[]} */ (items.at(-1)).push(line);
  }
  const made = items.map((item, n) =>
    el("li", {}, ...contents(item, growing && n === items.length - 1, depth)),
  );
  if (!ordered(first)) return el("ul", {}, ...made);
  return el("ol", { start: Number.parseInt(first[2], 10) }, ...made);
}

/**
 * The content of a list item; a single paragraph is inlined.
 * @param {string[]} item
 * @param {boolean} growing
 * @param {number} depth
 */
function contents(item, growing, depth) {
  const [head, ...rest] = item;
  const filled = rest.filter((line) => line.trim());
  const margin = Math.min(...filled.map((line) => line.search(/\S/)));
  const inner = [head, ...rest.map((line) => line.slice(Math.min(margin, line.search(/\S|$/))))];
  const nodes = inside(inner.join("\n"), growing, depth);
  const paragraphs = nodes.filter((node) => node.tagName === "P");
  if (nodes[0]?.tagName !== "P" || paragraphs.length > 1) return nodes;
  return [...nodes[0].childNodes, ...nodes.slice(1)];
}

/** @param {string[]} lines */
function table(lines) {
  /** @param {string} line */
  const cells = (line) =>
    line
      .trim()
      .replace(/^\||(?<!\\)\|$/g, "")
      .split(/(?<!\\)\|/)
      .map((cell) => cell.trim());
  const sides = cells(lines[1]).map((cell) =>
    cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "left",
  );
  /**
   * @param {string} line
   * @param {"td" | "th"} kind
   */
  const row = (line, kind) =>
    el(
      "tr",
      {},
      ...cells(line)
        .slice(0, sides.length)
        .map((cell, n) => el(kind, { class: sides[n] }, ...inline(cell.replaceAll("\\|", "|")))),
    );
  const body = lines.slice(2).map((line) => row(line, "td"));
  const made = el("table", {}, el("thead", {}, row(lines[0], "th")), el("tbody", {}, ...body));
  return el("div", { class: "wide" }, made);
}
