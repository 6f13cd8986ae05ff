/** Scrolling line plot of the latest values of a few series. */

import { el, svg } from "./dom.js";

const POINTS = 180;
const HEIGHT = 100;

/** @typedef {(number | null)[]} Values of the series at a time; null: there is none */

export class Plot {
  /**
   * @param {string} title
   * @param {string[]} names of the series
   * @param {(value: number) => string} format
   * @param {number} [most] fixed maximum of the axis
   */
  constructor(title, names, format, most) {
    this.title = title;
    this.names = names;
    this.format = format;
    this.most = most;
    /** @type {Values[]} */
    this.values = [];
    this.lines = names.map((_, n) => svg("path", { class: `series-${n}` }));
    const box = {
      viewBox: `0 0 ${POINTS - 1} ${HEIGHT}`,
      preserveAspectRatio: "none",
      role: "img",
    };
    const middle = svg("path", { class: "grid", d: `M0 ${HEIGHT / 2}H${POINTS - 1}` });
    this.picture = svg("svg", box, middle, ...this.lines);
    this.now = names.map((_, n) => el("b", { class: `series-${n}` }, "–"));
    const legend = names.flatMap((name, n) => [el("span", {}, this.now[n], " ", name)]);
    this.top = el("span", { class: "top" });
    this.element = el(
      "figure",
      { class: "plot" },
      el("figcaption", {}, el("h3", {}, title), el("p", {}, ...legend)),
      el("div", {}, this.top, this.picture),
    );
    this.draw();
  }

  /** @param {Values} values */
  push(values) {
    this.values.push(values);
    if (this.values.length > POINTS) this.values.shift();
    this.draw();
  }

  /** The latest value of the first series. */
  get latest() {
    return this.values.at(-1)?.[0] ?? null;
  }

  clear() {
    this.values = [];
    this.draw();
  }

  draw() {
    const all = this.values.flat().filter((value) => value !== null);
    const most = this.most ?? roundUp(Math.max(...all, 0));
    const latest = this.values.at(-1) ?? [];
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
    const left = POINTS - this.values.length;
    let down = false;
    return this.values
      .map((values, n) => {
        const value = values[series] ?? null;
        const step =
          value === null
            ? ""
            : `${down ? "L" : "M"}${left + n} ${round(HEIGHT * (1 - value / most))}`;
        down = value !== null;
        return step;
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
