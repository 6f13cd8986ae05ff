/** Parser of Prometheus's text format. */

/** @typedef {{name: string, labels: Record<string, string>, value: number}} Figure */

const LINE = /^([\w:]+)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;
/** @type {Record<string, string>} */
const ESCAPED = { "\\n": "\n", '\\"': '"', "\\\\": "\\" };

/**
 * @param {string} text
 * @returns {Figure[]}
 */
export function parse(text) {
  return text.split("\n").flatMap((line) => {
    const found = line.startsWith("#") ? null : LINE.exec(line);
    if (!found) return [];
    const pairs = [...(found[2] ?? "").matchAll(LABEL)].map(([, name, value]) => [
      name,
      value.replace(/\\./g, (sign) => ESCAPED[sign] ?? sign),
    ]);
    return [{ name: found[1], labels: Object.fromEntries(pairs), value: Number(found[3]) }];
  });
}
