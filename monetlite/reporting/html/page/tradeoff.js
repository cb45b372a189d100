"use strict";

/**
 * Places are bytes of memory, and step time over plain training's, less one.
 * @typedef {[number, number]} Place
 *
 * @typedef {object} TradeoffData
 * @property {{name: string, points: Place[]}[]} curves  the first is ours
 * @property {{name: string, place: Place}[]} points
 * @property {Place[]} bound  each budget, and the overhead that no schedule within it is below
 * @property {number} proven_bytes  no schedule needs less
 */

const CURVE_HEIGHT = 340;
const HEADROOM = 0.5;
const LABEL_WIDTH = 200;

/** Step time against memory, drawn as wide as the page is. */
class Tradeoff {
  /** @param {HTMLElement} host @param {TradeoffData} data */
  constructor(host, data) {
    this.host = host;
    this.data = data;
    const known = [...data.curves[0]?.points ?? [], ...data.points.map((point) => point.place)];
    const all = [...known, ...data.bound, ...data.curves.flatMap((curve) => curve.points)];
    this.mostBytes = 1.04 * Math.max(...all.map(([bytes]) => bytes));
    this.leastBytes = 0.96 * Math.min(data.proven_bytes, ...all.map(([bytes]) => bytes));
    const overheads = known.map(([, overhead]) => overhead);
    const span = Math.max(0.02, Math.max(...overheads) - Math.min(0, ...overheads));
    this.low = Math.min(0, ...overheads, ...data.bound.map(([, overhead]) => overhead)) - 0.05 * span;
    this.high = Math.min(Math.max(...all.map(([, overhead]) => overhead)), Math.max(...overheads) + HEADROOM * span)
      + 0.15 * span;
    new ResizeObserver(oncePerFrame(() => this.draw())).observe(host);
    addEventListener("beforeprint", () => this.draw(PAPER_WIDTH));
    addEventListener("afterprint", () => this.draw());
  }

  /** @param {number} bytes */
  x(bytes) {
    const share = (bytes - this.leastBytes) / (this.mostBytes - this.leastBytes);
    return MARGIN.left + share * (this.width - MARGIN.left - MARGIN.right);
  }

  /** @param {number} overhead */
  y(overhead) {
    const share = (overhead - this.low) / (this.high - this.low);
    return CURVE_HEIGHT - MARGIN.bottom - Math.min(1, share) * (CURVE_HEIGHT - MARGIN.top - MARGIN.bottom);
  }

  /** @param {number} [width] in pixels; by default what the page has */
  draw(width = this.host.clientWidth) {
    this.width = Math.max(240, width);
    /** Places of the labels so far. @type {[number, number][]} */
    this.labels = [];
    this.host.replaceChildren(drawn("svg", {
      viewBox: `0 0 ${this.width} ${CURVE_HEIGHT}`, role: "img",
      "aria-label": "Step time over plain training's, against memory; the table below has the numbers",
    }, this.impossible(), this.grid(), ...this.data.curves.map((curve, number) => this.curve(curve, number === 0)),
    ...this.singles()));
  }

  /** What no schedule reaches: less memory than is proven, or less time than the bound. */
  impossible() {
    const [left, right, top, floor] = [this.x(this.leastBytes), this.x(this.mostBytes), MARGIN.top, CURVE_HEIGHT - MARGIN.bottom];
    const corners = [[left, floor], [left, top], [this.x(this.data.proven_bytes), top]];
    let from = this.data.proven_bytes;
    for (const [bytes, overhead] of this.data.bound) {
      const y = Math.min(floor, this.y(overhead));
      corners.push([this.x(from), y], [this.x(bytes), y]);
      from = bytes;
    }
    corners.push([Math.min(right, this.x(from)), floor]);
    return drawn("polygon", { class: "impossible", points: corners.map((corner) => corner.join(",")).join(" ") });
  }

  grid() {
    const group = drawn("g", { class: "grid" });
    for (const overhead of ticks(this.low, this.high, 5)) {
      const y = this.y(overhead);
      group.append(drawn("line", { x1: MARGIN.left, x2: this.width - MARGIN.right, y1: y, y2: y }),
        drawn("text", { x: MARGIN.left - 6, y: y + 4, "text-anchor": "end" }, percents(overhead)));
    }
    for (const bytes of ticks(this.leastBytes, this.mostBytes, this.width / 110)) {
      group.append(drawn("text", { x: this.x(bytes), y: CURVE_HEIGHT - 6, "text-anchor": "middle" }, formatBytes(bytes)));
    }
    return group;
  }

  /** @param {{name: string, points: Place[]}} curve @param {boolean} ours */
  curve({ name, points: all }, ours) {
    const points = all.filter(([, overhead]) => overhead <= this.high);
    if (!points.length) return "";
    const places = points.map(([bytes, overhead]) => [this.x(bytes), this.y(overhead)]);
    const [x, y] = places[0];
    return drawn("g", { class: ours ? "ours" : null },
      drawn("path", { d: `M${places.map((place) => place.join(" ")).join("L")}`, "stroke-dasharray": ours ? null : "5 3" }),
      ...places.map(([cx, cy], at) => drawn("circle", { cx, cy, r: ours ? 4 : 2.5 },
        drawn("title", {}, `${name}: ${formatBytes(points[at][0])}, ${percents(points[at][1])}`))),
      ours ? "" : drawn("text", { x: x + 6, y: this.labelled(x, y, -6) }, name));
  }

  /**
   * The height of a label beside a place: the first in which no other label is, within the axes.
   * @param {number} x @param {number} y @param {number} rise  of the label over the place, where there is room
   */
  labelled(x, y, rise) {
    const isFree = (/** @type {number} */ height) => height > MARGIN.top && height < CURVE_HEIGHT - MARGIN.bottom
      && this.labels.every(([left, top]) => Math.abs(left - x) > LABEL_WIDTH || Math.abs(top - height) > 14);
    const heights = [0, 28, -16, 44, -32, 60].map((further) => y + rise + further);
    const found = heights.find(isFree) ?? y + rise;
    this.labels.push([x, found]);
    return found;
  }

  singles() {
    return this.data.points.map(({ name, place: [bytes, overhead] }) => {
      const [cx, cy] = [this.x(bytes), this.y(overhead)];
      const anchor = cx > this.width / 2 ? "end" : "start";
      const y = this.labelled(cx, cy, -9);
      return drawn("g", { class: "single" }, drawn("circle", { cx, cy, r: 5 }),
        drawn("text", { x: cx + (anchor === "end" ? -8 : 8), y, "text-anchor": anchor }, `${name}, ${percents(overhead)}`));
    });
  }
}

/** A difference as a share, with its sign. @param {number} share */
const percents = (share) => signed(100 * share, (number) => `${threeDigits(number)}%`);
