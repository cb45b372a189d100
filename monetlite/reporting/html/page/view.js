"use strict";

/** The part of the horizontal axis that is shown, in ms or in steps. Both charts share it. */
class View {
  /** @param {Run[]} runs @param {() => void} changed called when what is shown changes */
  constructor(runs, changed) {
    this.runs = runs;
    this.changed = changed;
    /** @type {"time" | "step"} */
    this.unit = "time";
    this.from = 0;
    this.to = this.extent;
  }

  /** Where the longest of the runs ends. */
  get extent() { return Math.max(...this.runs.map((run) => run.edge(this.unit, run.count))) || 1; }

  get isWhole() { return this.from <= 0 && this.to >= this.extent; }

  /** Shows a range, moved inside of what there is, and no less of it than a few steps. @param {number} from @param {number} to */
  show(from, to) {
    const { extent } = this;
    const shortest = (4 * extent) / Math.max(8, ...this.runs.map((run) => run.count));
    const span = Math.min(extent, Math.max(shortest, to - from));
    const begin = Math.min(Math.max(0, (from + to - span) / 2), extent - span);
    this.from = begin;
    this.to = begin + span;
    this.changed();
  }

  /** @param {number} factor below 1 to come closer @param {number} share the place on screen that stays, from 0 to 1 */
  zoom(factor, share = 0.5) {
    const span = this.to - this.from;
    const centre = this.from + share * span;
    const wanted = Math.min(this.extent, span * factor);
    this.show(centre - share * wanted, centre + (1 - share) * wanted);
  }

  /** @param {number} share of the shown range; to the right if positive */
  move(share) {
    const by = share * (this.to - this.from);
    const bounded = Math.min(Math.max(by, -this.from), this.extent - this.to);
    this.show(this.from + bounded, this.to + bounded);
  }

  reset() { this.show(0, this.extent); }

  /** Measures across in another unit, from beginning to end. @param {"time" | "step"} unit */
  measure(unit) {
    this.unit = unit;
    this.reset();
  }

  /** Shows other runs; what was shown of all stays as far as it can. @param {Run[]} runs */
  compare(runs) {
    const whole = this.isWhole;
    this.runs = runs;
    if (whole) this.reset();
    else this.show(this.from, this.to);
  }

  /** Moves until a step is shown. @param {Run} run @param {number} step */
  reveal(run, step) {
    const begin = run.edge(this.unit, step);
    const end = run.edge(this.unit, step + 1);
    const span = this.to - this.from;
    if (begin < this.from) this.show(begin - 0.1 * span, begin + 0.9 * span);
    else if (end > this.to) this.show(end - 0.9 * span, end + 0.1 * span);
  }

  /** In words: what is shown, and of how much. */
  describe() {
    if (this.unit === "step") {
      const [first, last] = [Math.floor(this.from), Math.ceil(this.to) - 1].map((step) => this.runs[0].number(step));
      return `steps ${first}–${last} of ${this.extent}`;
    }
    const [factor, unit] = timeUnit(this.extent);
    const digits = decimalsOf(roundStep((this.to - this.from) / factor / 100));
    const [from, to] = [this.from, this.to].map((ms) => (ms / factor).toFixed(digits));
    return `${from}–${to} ${unit} of ${formatMs(this.extent)}`;
  }
}
