"use strict";

/** Of the charts together, in pixels: two fifths of their width. */
const HEIGHTS = { least: 460, most: 720, share: 0.4 };
const PAPER_WIDTH = 760;

/** The page: two charts, the part of the axis that they share, and the step that is looked at. */
class Page {
  /** @param {Data} data */
  constructor(data) {
    this.data = data;
    this.runs = [new Run("scheduled", data), new Run("plain", data)];
    this.shownRuns = this.runs;
    this.holdings = data.holdings.map((_, holding) => holding);
    this.shownHoldings = new Set(this.holdings);
    this.looked = { run: this.runs[0], step: this.runs[0].peakStep };
    /** @type {Map<Run, number>} */
    this.lookedOf = new Map();
    this.kept = false;
    /** @type {number[]} */
    this.matches = [];
    this.draw = oncePerFrame(() => this.drawNow());
    this.look = oncePerFrame(() => this.lookNow());
    this.view = new View(this.runs, this.draw);
    this.charts = this.runs.map((run) => new Chart(run, data.budget_bytes));
    /** @param {Run} run @param {number} step */
    const go = (run, step) => this.go(run, step);
    this.panel = new Panel(byId("panel"), data.budget_bytes, go, () => this.keep(!this.kept));
    this.search = new Search(() => this.shownRuns[0], go, (steps) => this.mark(steps));
  }

  open() {
    for (const section of document.querySelectorAll(".scripted")) section.removeAttribute("hidden");
    byId("charts").append(...this.charts.map((chart) => chart.figure));
    for (const chart of this.charts) new Pointing(chart, this.view, this.acts(chart.run));
    this.addControls();
    fillTables(this.runs[0], this.data, (run, step) => {
      this.go(run, step);
      byId("memory").scrollIntoView({ block: "start" });
    });
    if (this.data.tradeoff) new Tradeoff(byId("curve"), this.data.tradeoff);
    new ResizeObserver(this.draw).observe(byId("charts"));
    addEventListener("beforeprint", () => this.drawNow(PAPER_WIDTH));
    addEventListener("afterprint", this.draw);
    this.drawNow();
    this.lookNow();
  }

  /** @param {Run} run @returns {Acts} */
  acts(run) {
    return {
      here: () => this.lookedOf.get(run) ?? run.peakStep,
      point: (step) => { if (!this.kept) this.lookAt(run, step); },
      press: (step) => {
        const letGo = this.kept && this.looked.run === run && this.looked.step === step;
        this.lookAt(run, step);
        this.keep(!letGo);
      },
      go: (step) => this.go(run, step),
    };
  }

  addControls() {
    byId("runs").append(...this.runs.map((run) => {
      const control = toggle(run.label, () => this.toggleRun(run));
      return filled(control, { "data-run": run.id }, []);
    }));
    byId("holdings").append(...this.holdings.filter((holding) => this.isEver(holding)).reverse().map((holding) => {
      const name = this.data.holdings[holding];
      const control = toggle("", (pressed) => this.toggleHolding(holding, pressed));
      control.append(element("span", { class: `swatch ${colourOf(name)}` }), name);
      return filled(control, { "data-holding": name }, []);
    }));
    byId("units").addEventListener("change", (event) => {
      this.view.measure(/** @type {"time" | "step"} */ (/** @type {HTMLInputElement} */ (event.target).value));
    });
    /** @type {Record<string, () => void>} */
    const zooms = {
      in: () => this.view.zoom(0.5),
      out: () => this.view.zoom(2),
      left: () => this.view.move(-0.25),
      right: () => this.view.move(0.25),
      reset: () => this.view.reset(),
    };
    for (const control of byId("zoom").querySelectorAll("button")) {
      control.addEventListener("click", zooms[control.dataset.action ?? "reset"]);
    }
  }

  /** Whether anything is ever held for a purpose. @param {number} holding */
  isEver(holding) { return this.runs.some((run) => run.bytesOf[holding].some((bytes) => bytes !== 0)); }

  /** Shows or hides a run; one is always shown. @param {Run} run */
  toggleRun(run) {
    const others = this.runs.filter((other) => other !== run);
    const shown = this.shownRuns.includes(run) ? others : this.runs;
    this.shownRuns = shown;
    for (const control of byId("runs").querySelectorAll("button")) {
      control.setAttribute("aria-pressed", String(shown.some((other) => other.id === control.dataset.run)));
    }
    for (const chart of this.charts) chart.figure.hidden = !shown.includes(chart.run);
    if (!shown.includes(this.looked.run)) this.lookAt(shown[0], shown[0].peakStep);
    this.view.compare(shown);
    this.search.look();
  }

  /** @param {number} holding @param {boolean} shown */
  toggleHolding(holding, shown) {
    if (shown) this.shownHoldings.add(holding);
    else this.shownHoldings.delete(holding);
    this.draw();
  }

  /** @param {number[]} steps */
  mark(steps) {
    this.matches = steps;
    this.draw();
  }

  /** Looks at a step and brings it into sight. @param {Run} run @param {number} step */
  go(run, step) {
    if (!this.shownRuns.includes(run)) this.toggleRun(run);
    this.view.reveal(run, step);
    this.lookAt(run, step);
  }

  /** @param {Run} run @param {number} step */
  lookAt(run, step) {
    if (this.looked.run === run && this.looked.step === step) return;
    this.looked = { run, step };
    this.lookedOf.set(run, step);
    this.look();
  }

  /** @param {boolean} kept */
  keep(kept) {
    this.kept = kept;
    this.look();
  }

  /** @param {number} [width] of the charts; by default what the page has for them */
  drawNow(width = byId("charts").clientWidth) {
    const shown = this.holdings.filter((holding) => this.shownHoldings.has(holding));
    const together = Math.min(HEIGHTS.most, Math.max(HEIGHTS.least, HEIGHTS.share * width));
    const mostBytes = this.mostBytes(shown);
    for (const chart of this.charts.filter((chart) => !chart.figure.hidden)) {
      chart.measure(width, together / this.shownRuns.length);
      chart.draw(this.view, shown, mostBytes, chart.run === this.shownRuns[0] ? this.matches : []);
    }
    byId("range").textContent = this.view.describe();
    this.pointNow();
  }

  /** The top of both charts: their peaks and the budget, or the most of what is shown. @param {number[]} shown */
  mostBytes(shown) {
    const all = shown.length === this.holdings.length;
    const peaks = this.shownRuns.map((run) => run.sumOf(shown).reduce((most, bytes) => Math.max(most, bytes), 0));
    return 1.04 * Math.max(1, ...peaks, all ? this.data.budget_bytes : 0);
  }

  lookNow() {
    this.panel.show(this.looked.run, this.looked.step, this.kept);
    this.pointNow();
  }

  pointNow() {
    const { run, step } = this.looked;
    const name = run.name(step);
    for (const chart of this.charts) {
      if (chart.run === run) chart.point(this.view, step, `step ${run.number(step)}, ${name}, ${formatBytes(run.totals[step])}`);
      else chart.pointTwin(this.view, chart.run.stepsOf.get(name)?.[0]);
    }
  }
}

new Page(JSON.parse(byId("data").textContent ?? "")).open();
