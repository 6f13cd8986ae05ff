/** Scrolling line plot of the latest values of a few series. */

import { el, svg } from "./dom.js";

const SECONDS = 180; // that are shown
const GAP = 5; // seconds without a value after which a line begins anew
const HEIGHT = 100;

/** @typedef {(number | null)[]} Values of the series at a time; null: there is none */

export class Plot {
  /**
   * @param {string} title
   * @param {string[]} names of the series
   * @param {(value: number) => string} format
   * @param {number} [most] fixed maximum of the axis
   * @param {string[]} [calm] series that are drawn faintly
   */
  constructor(title, names, format, most, calm = []) {
    this.title = title;
    this.names = names;
    this.format = format;
    this.most = most;
    /** @type {{at: number, values: Values}[]} with the times in seconds */
    this.points = [];
    const kinds = names.map((name, n) => `series-${n}${calm.includes(name) ? " calm" : ""}`);
    this.lines = kinds.map((kind) => svg("path", { class: kind }));
    const box = {
      viewBox: `0 0 ${SECONDS} ${HEIGHT}`,
      preserveAspectRatio: "none",
      role: "img",
    };
    const middle = svg("path", { class: "grid", d: `M0 ${HEIGHT / 2}H${SECONDS}` });
    this.picture = svg("svg", box, middle, ...this.lines);
    this.now = kinds.map((kind) => el("b", { class: kind }, "–"));
    const legend = names.flatMap((name, n) => [el("span", {}, this.now[n], " ", name)]);
    this.top = el("span", { class: "top" });
    this.element = el(
      "figure",
      { class: "plot" },
      el("figcaption", {}, el("h3", {}, title), el("p", {}, ...legend)),
      el("div", {}, this.top, this.picture),
      el(
        "p",
        { class: "times", "aria-hidden": "true" },
        el("span", {}, "3 min ago"),
        el("span", {}, "now"),
      ),
    );
    this.draw();
  }

  /**
   * @param {Values} values
   * @param {number} at their time in milliseconds
   */
  push(values, at = performance.now()) {
    const now = at / 1000;
    this.points.push({ at: now, values });
    this.points = this.points.filter((one) => one.at >= now - SECONDS);
    this.draw();
  }

  /** The latest value of the first series. */
  get latest() {
    return this.points.at(-1)?.values[0] ?? null;
  }

  clear() {
    this.points = [];
    this.draw();
  }

  draw() {
    const all = this.points.flatMap(({ values }) => values.filter((value) => value !== null));
    const most = this.most ?? roundUp(Math.max(...all, 0));
    const latest = this.points.at(-1)?.values ?? [];
    const words = this.names.map((name, n) => {
      const value = latest[n] ?? null;
      this.now[n].textContent = value === null ? "–" : this.format(value);
      return `${name} ${this.now[n].textContent}`;
    });
    this.top.textContent = this.format(most);
    this.picture.setAttribute("aria-label", `${this.title}: ${words.join(", ")}`);
    this.lines.forEach((line, n) => line.setAttribute("d", this.path(n, most)));
  }

  /**
   * A line, with gaps where there is no value; the latest is at the right.
   * @param {number} series
   * @param {number} most
   */
  path(series, most) {
    const now = this.points.at(-1)?.at ?? 0;
    let before = -Infinity;
    return this.points
      .map(({ at, values }) => {
        const value = values[series] ?? null;
        if (value === null) {
          before = -Infinity;
          return "";
        }
        const sign = at - before > GAP ? "M" : "L";
        before = at;
        return `${sign}${round(SECONDS - now + at)} ${round(HEIGHT * (1 - value / most))}`;
      })
      .join("");
  }
}

/** @param {number} value rounded up to 1, 2, 5, 10, 20, … */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 5, 10].map((one) => one * power).find((one) => one >= value) ?? value;
}

/** @param {number} value */
const round = (value) => Math.round(value * 100) / 100;
