/** Drawing of what grows, as often as its cost allows: long texts stay a small share of the time. */

const SHARE = 3; // pauses are this many times as long as the drawing before
const RARELY = 1000; // milliseconds that a pause lasts at most

export class Redraw {
  /** @param {() => void} draw */
  constructor(draw) {
    this.draw = draw;
    this.wanted = false;
    this.frame = 0;
    this.pause = 0;
  }

  /** Draws soon. */
  request() {
    this.wanted = true;
    if (!this.pause) this.frame ||= requestAnimationFrame(() => this.now());
  }

  now() {
    const begun = performance.now();
    this.frame = 0;
    this.wanted = false;
    this.draw();
    // The browser paints before it comes to this.
    this.pause = setTimeout(() => {
      const cost = performance.now() - begun;
      this.pause = setTimeout(() => this.go(), Math.min(RARELY, SHARE * cost));
    });
  }

  /** Ends a pause. */
  go() {
    this.pause = 0;
    if (this.wanted) this.request();
  }

  stop() {
    cancelAnimationFrame(this.frame);
    clearTimeout(this.pause);
  }
}
