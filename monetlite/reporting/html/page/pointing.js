"use strict";

const DRAG_PIXELS = 5;

/**
 * What a person does to a chart by mouse, touch or keys, told to the page.
 * @typedef {object} Acts
 * @property {() => number} here  the step of this chart that was looked at last
 * @property {(step: number) => void} point
 * @property {(step: number) => void} press  a click, or Enter: keep the step, or let it go
 * @property {(step: number) => void} go  by keys: also shows the step
 */

/** Listens to one chart. */
class Pointing {
  /** @param {Chart} chart @param {View} view @param {Acts} acts */
  constructor(chart, view, acts) {
    this.chart = chart;
    this.view = view;
    this.acts = acts;
    /** @type {{x: number, moves: boolean, dragged: boolean, last: number} | null} */
    this.drag = null;
    const { plot } = chart;
    plot.addEventListener("pointerdown", (event) => this.press(event));
    plot.addEventListener("pointermove", (event) => this.pointerMoved(event));
    plot.addEventListener("pointerup", (event) => this.release(event));
    plot.addEventListener("pointercancel", () => this.letGo());
    plot.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    plot.addEventListener("keydown", (event) => this.key(event));
  }

  /** Pixels from the left of the chart. @param {MouseEvent} event */
  pixels(event) { return event.clientX - this.chart.svg.getBoundingClientRect().left; }

  /** Where that is on the screen's part of the axis, from 0 to 1. @param {number} pixels */
  share(pixels) { return Math.min(1, Math.max(0, (pixels - MARGIN.left) / this.chart.plotWidth)); }

  /** @param {number} pixels */
  place(pixels) { return this.view.from + this.share(pixels) * (this.view.to - this.view.from); }

  /** @param {number} pixels */
  step(pixels) { return this.chart.run.stepAt(this.view.unit, this.place(pixels)); }

  /** @param {PointerEvent} event */
  press(event) {
    if (event.button !== 0) return;
    const x = this.pixels(event);
    this.drag = { x, last: x, moves: event.shiftKey || event.pointerType === "touch", dragged: false };
    this.chart.plot.setPointerCapture(event.pointerId);
  }

  /** @param {PointerEvent} event */
  pointerMoved(event) {
    const x = this.pixels(event);
    const { drag } = this;
    if (!drag) {
      this.acts.point(this.step(x));
      return;
    }
    drag.dragged ||= Math.abs(x - drag.x) >= DRAG_PIXELS;
    if (!drag.dragged) return;
    if (drag.moves) this.view.move((drag.last - x) / this.chart.plotWidth);
    else this.chart.select(...this.dragged(drag.x, x));
    drag.last = x;
  }

  /** The two ends of a drag, inside the axes. @param {number[]} ends @returns {[number, number]} */
  dragged(...ends) {
    const [from, to] = ends.map((x) => MARGIN.left + this.share(x) * this.chart.plotWidth);
    return [from, to];
  }

  /** @param {PointerEvent} event */
  release(event) {
    const { drag } = this;
    this.letGo();
    if (!drag) return;
    const x = this.pixels(event);
    if (!drag.dragged) this.acts.press(this.step(x));
    else if (!drag.moves) this.view.show(this.place(Math.min(drag.x, x)), this.place(Math.max(drag.x, x)));
  }

  letGo() {
    this.drag = null;
    this.chart.select();
  }

  /** @param {WheelEvent} event */
  wheel(event) {
    const across = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    // Where all is shown, there is nothing to move to and nothing further out: the page scrolls.
    if (this.view.isWhole && (across || event.deltaY > 0)) return;
    event.preventDefault();
    if (across) this.view.move(Math.sign(event.deltaX || event.deltaY) * 0.1);
    else this.view.zoom(event.deltaY < 0 ? 0.8 : 1.25, this.share(this.pixels(event)));
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const { run } = this.chart;
    const here = this.acts.here();
    const far = event.shiftKey ? 10 : 1;
    const go = (/** @type {number} */ step) => this.acts.go(Math.min(run.count - 1, Math.max(0, step)));
    /** @type {Record<string, () => void>} */
    const keys = {
      ArrowLeft: () => go(here - far),
      ArrowDown: () => go(here - far),
      ArrowRight: () => go(here + far),
      ArrowUp: () => go(here + far),
      Home: () => go(0),
      End: () => go(run.count - 1),
      p: () => go(run.peakStep),
      "+": () => this.view.zoom(0.5, this.shareOf(here)),
      "=": () => this.view.zoom(0.5, this.shareOf(here)),
      "-": () => this.view.zoom(2, this.shareOf(here)),
      PageUp: () => this.view.move(-0.5),
      PageDown: () => this.view.move(0.5),
      Escape: () => (this.drag ? this.letGo() : this.view.reset()),
      Enter: () => this.acts.press(here),
    };
    if (!Object.hasOwn(keys, event.key)) return;
    event.preventDefault();
    keys[event.key]();
  }

  /** Where a step is on the screen, from 0 to 1; the middle where it is not. @param {number} step */
  shareOf(step) {
    const { unit, from, to } = this.view;
    const share = (this.chart.run.edge(unit, step) - from) / (to - from);
    return share >= 0 && share <= 1 ? share : 0.5;
  }
}
