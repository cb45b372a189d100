"use strict";

const MARGIN = { left: 62, right: 14, top: 24, bottom: 24 };
const NARROWEST = 1;

/**
 * Steps as wide as the screen can show: of those that share a pixel, the one that holds most.
 * @param {Run} run @param {View} view @param {Float64Array} bytes at each step @param {number} width in pixels
 * @returns {{x0: number, x1: number, step: number}[]}
 */
function segmentsOf(run, view, bytes, width) {
  const scale = width / (view.to - view.from);
  const place = (/** @type {number} */ step) =>
    Math.min(width, Math.max(0, (run.edge(view.unit, step) - view.from) * scale));
  const last = run.stepAt(view.unit, view.to);
  /** @type {{x0: number, x1: number, step: number}[]} */
  const found = [];
  for (let step = run.stepAt(view.unit, view.from); step <= last; step++) {
    const x1 = place(step + 1);
    const open = found.at(-1);
    if (open && x1 - open.x0 < NARROWEST) {
      open.x1 = x1;
      if (bytes[step] > bytes[open.step]) open.step = step;
      continue;
    }
    if (open) open.x1 = Math.max(open.x1, open.x0 + NARROWEST);
    const x0 = open ? open.x1 : place(step);
    found.push({ x0, x1: Math.max(x0, x1), step });
  }
  return found;
}

/** The memory of one run, stacked by what it is held for. */
class Chart {
  /** @param {Run} run @param {number} budgetBytes */
  constructor(run, budgetBytes) {
    this.run = run;
    this.budgetBytes = budgetBytes;
    this.width = 0;
    this.height = 0;
    this.mostBytes = 1;
    this.grid = drawn("g", { class: "grid" });
    this.bands = run.holdings.map((holding) =>
      drawn("path", { class: `band ${colourOf(holding)}`, "data-holding": holding }));
    this.notes = drawn("g", { class: "notes" });
    this.marks = drawn("path", { class: "marks" });
    this.cursor = drawn("rect", { class: "cursor", visibility: "hidden" });
    this.twin = drawn("line", { class: "twin", visibility: "hidden" });
    this.selection = drawn("rect", { class: "selection", visibility: "hidden" });
    this.svg = drawn("svg", { "aria-hidden": "true", focusable: "false" },
      this.grid, ...[...this.bands].reverse(), this.marks, this.notes, this.twin, this.cursor, this.selection);
    this.plot = element("div", {
      class: "plot", tabindex: 0, role: "slider", "aria-label": `Step of ${run.title}`,
      "aria-valuemin": run.number(0), "aria-valuemax": run.number(run.count - 1), "aria-valuenow": run.number(run.peakStep),
    }, this.svg);
    this.figure = element("figure", { id: `chart-${run.id}`, class: "chart" },
      element("figcaption", {}, ...this.caption()), this.plot);
  }

  caption() {
    const { run } = this;
    const peak = formatBytes(run.totals[run.peakStep]);
    return [
      element("b", {}, run.label),
      `: ${formatMs(run.startMs[run.count])}, ${counted(run.count, "step")}, peak ${peak} at `,
      named(run.name(run.peakStep)), ` (${run.place(run.peakStep)})`,
    ];
  }

  get plotWidth() { return Math.max(1, this.width - MARGIN.left - MARGIN.right); }

  get plotHeight() { return this.height - MARGIN.top - MARGIN.bottom; }

  get bottom() { return this.height - MARGIN.bottom; }

  /** @param {number} width in pixels @param {number} height in pixels */
  measure(width, height) {
    this.width = Math.max(240, width);
    this.height = height;
    filled(this.svg, { viewBox: `0 0 ${this.width} ${height}` }, []);
  }

  /** @param {View} view @param {number} place on the horizontal axis */
  x(view, place) { return MARGIN.left + ((place - view.from) / (view.to - view.from)) * this.plotWidth; }

  /** @param {number} bytes */
  y(bytes) { return this.bottom - (Math.max(0, bytes) / this.mostBytes) * this.plotHeight; }

  /**
   * Draws everything but the cursor.
   * @param {View} view @param {number[]} shown the holdings that are, from the bottom @param {number} mostBytes
   * @param {number[]} matches steps to mark
   */
  draw(view, shown, mostBytes, matches) {
    this.mostBytes = mostBytes;
    this.drawGrid(view);
    this.drawBands(view, shown);
    this.drawMatches(view, matches);
    this.drawNotes(view, shown.length === this.bands.length);
  }

  /** @param {View} view */
  drawGrid(view) {
    const right = this.width - MARGIN.right;
    const lines = ticks(0, this.mostBytes, 4).flatMap((bytes) => {
      const y = this.y(bytes);
      return [
        drawn("line", { x1: MARGIN.left, x2: right, y1: y, y2: y }),
        drawn("text", { x: MARGIN.left - 6, y: y + 4, "text-anchor": "end" }, bytes ? formatBytes(bytes) : "0"),
      ];
    });
    const isTime = view.unit === "time";
    // The number of a step stands below its middle.
    const shift = isTime ? 0 : this.run.number(0) - 0.5;
    const places = ticks(view.from + shift, view.to + shift, this.plotWidth / 100)
      .filter((place) => isTime || Number.isInteger(place));
    const labels = isTime ? timeLabels(places, view.extent) : places.map(String);
    const across = places.map((place, number) => {
      const x = this.x(view, place - shift);
      const anchor = x > right - 24 ? "end" : x < MARGIN.left + 24 ? "start" : "middle";
      return drawn("text", { x: Math.min(x, right), y: this.bottom + 16, "text-anchor": anchor }, labels[number]);
    });
    this.grid.replaceChildren(...lines, ...across);
  }

  /** From the top of the stack down, each band to the bottom, so that lower ones cover it. @param {View} view @param {number[]} shown */
  drawBands(view, shown) {
    const sums = this.run.sumOf(shown);
    const segments = segmentsOf(this.run, view, sums, this.plotWidth);
    const heights = new Float64Array(segments.length);
    this.bands.forEach((band, holding) => {
      const isShown = shown.includes(holding);
      if (isShown) {
        const bytes = this.run.bytesOf[holding];
        segments.forEach(({ step }, number) => { heights[number] += Math.max(0, bytes[step]); });
      }
      band.setAttribute("d", isShown && segments.length ? this.outline(segments, heights) : "");
    });
  }

  /** @param {{x0: number, x1: number}[]} segments @param {Float64Array} heights in bytes */
  outline(segments, heights) {
    const left = MARGIN.left;
    const parts = [`M${(left + segments[0].x0).toFixed(1)} ${this.bottom}`];
    let before = "";
    segments.forEach(({ x1 }, number) => {
      const y = this.y(heights[number]).toFixed(1);
      const x = (left + x1).toFixed(1);
      if (y === before) parts[parts.length - 1] = `H${x}`;
      else parts.push(`V${y}`, `H${x}`);
      before = y;
    });
    return `${parts.join("")}V${this.bottom}Z`;
  }

  /** @param {View} view @param {number[]} matches */
  drawMatches(view, matches) {
    const places = matches
      .map((step) => (this.run.edge(view.unit, step) + this.run.edge(view.unit, step + 1)) / 2)
      .filter((place) => place >= view.from && place <= view.to)
      .map((place) => `M${this.x(view, place).toFixed(1)} ${this.bottom}v6`);
    this.marks.setAttribute("d", [...new Set(places)].join(""));
  }

  /** Budget, peak, and where the backward pass begins. @param {View} view @param {boolean} whole whether all is stacked */
  drawNotes(view, whole) {
    const peakX = this.x(view, this.peakPlace(view));
    this.notes.replaceChildren();
    this.noteBackward(view);
    if (!whole) return;
    this.noteBudget(peakX > MARGIN.left + this.plotWidth / 2);
    if (peakX >= MARGIN.left && peakX <= this.width - MARGIN.right) this.notePeak(peakX);
  }

  /** @param {View} view */
  peakPlace(view) {
    const { run } = this;
    return (run.edge(view.unit, run.peakStep) + run.edge(view.unit, run.peakStep + 1)) / 2;
  }

  /** @param {View} view */
  noteBackward(view) {
    const x = this.x(view, this.run.edge(view.unit, this.run.columns.backward_begins));
    if (x < MARGIN.left || x > this.width - MARGIN.right - 60) return;
    this.notes.append(
      drawn("line", { class: "backward", x1: x, x2: x, y1: MARGIN.top, y2: this.bottom }),
      drawn("text", { x: x + 5, y: this.bottom - 6 }, "backward"),
    );
  }

  /** @param {boolean} atLeft where its label stands */
  noteBudget(atLeft) {
    const y = this.y(this.budgetBytes);
    const right = this.width - MARGIN.right;
    const label = { x: atLeft ? MARGIN.left + 5 : right - 5, y: y - 5, "text-anchor": atLeft ? "start" : "end" };
    this.notes.append(
      drawn("line", { class: "budget", x1: MARGIN.left, x2: right, y1: y, y2: y }),
      drawn("text", label, `budget ${formatBytes(this.budgetBytes)}`),
    );
  }

  /** @param {number} x */
  notePeak(x) {
    const y = this.y(this.run.totals[this.run.peakStep]);
    const share = (x - MARGIN.left) / this.plotWidth;
    const anchor = share < 0.33 ? "start" : share > 0.67 ? "end" : "middle";
    const most = Math.floor(this.plotWidth * 0.66 / 6.5);
    const peak = `peak ${formatBytes(this.run.totals[this.run.peakStep])}: `;
    const name = shortened(this.run.name(this.run.peakStep), Math.max(8, most - peak.length));
    this.notes.append(
      drawn("path", { class: "peak", d: `M${x} ${MARGIN.top - 6}V${y}` }),
      drawn("circle", { class: "peak", cx: x, cy: y, r: 4 }),
      drawn("text", { x, y: MARGIN.top - 10, "text-anchor": anchor }, peak + name),
    );
  }

  /** Marks the step that is looked at. @param {View} view @param {number} step @param {string} said */
  point(view, step, said) {
    const begin = Math.max(MARGIN.left, this.x(view, this.run.edge(view.unit, step)));
    const end = Math.min(this.width - MARGIN.right, this.x(view, this.run.edge(view.unit, step + 1)));
    const isShown = begin <= this.width - MARGIN.right && end >= MARGIN.left;
    filled(this.cursor, {
      x: begin, width: Math.max(1.5, end - begin), y: MARGIN.top, height: this.plotHeight,
      visibility: isShown ? "visible" : "hidden",
    }, []);
    this.twin.setAttribute("visibility", "hidden");
    filled(this.plot, { "aria-valuenow": this.run.number(step), "aria-valuetext": said }, []);
  }

  /** Marks where the other chart's operator runs here. @param {View} view @param {number | undefined} step */
  pointTwin(view, step) {
    this.cursor.setAttribute("visibility", "hidden");
    const x = step === undefined ? -1 : this.x(view, (this.run.edge(view.unit, step) + this.run.edge(view.unit, step + 1)) / 2);
    const isShown = x >= MARGIN.left && x <= this.width - MARGIN.right;
    filled(this.twin, { x1: x, x2: x, y1: MARGIN.top, y2: this.bottom, visibility: isShown ? "visible" : "hidden" }, []);
  }

  /** Shows the range that is being dragged over; none without pixels. @param {number} [from] @param {number} [to] */
  select(from, to) {
    if (from === undefined || to === undefined) {
      this.selection.setAttribute("visibility", "hidden");
      return;
    }
    filled(this.selection, {
      x: Math.min(from, to), width: Math.abs(to - from), y: MARGIN.top, height: this.plotHeight, visibility: "visible",
    }, []);
  }
}
