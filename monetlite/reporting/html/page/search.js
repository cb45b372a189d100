"use strict";

const MAX_LISTED = 100;

/** Finds steps by the names of their operators, modules and operations. */
class Search {
  /** @param {() => Run} runOf where to look @param {(run: Run, step: number) => void} go @param {(steps: number[]) => void} found */
  constructor(runOf, go, found) {
    this.runOf = runOf;
    this.go = go;
    this.found = found;
    /** @type {number[]} */
    this.steps = [];
    this.at = -1;
    this.query = /** @type {HTMLInputElement} */ (byId("query"));
    this.query.addEventListener("input", () => this.look());
    byId("search").addEventListener("submit", (event) => {
      event.preventDefault();
      this.next();
    });
  }

  /** Looks for what is written; steps stay in their order. */
  look() {
    const wanted = this.query.value.trim().toLowerCase();
    const run = this.runOf();
    this.steps = [];
    this.at = -1;
    for (let step = 0; wanted && step < run.count; step++) {
      const names = [run.name(step), run.operatorText("module", step), run.operatorText("family", step)];
      if (names.some((name) => name.toLowerCase().includes(wanted))) this.steps.push(step);
    }
    byId("found").textContent = wanted ? `${counted(this.steps.length, "step")} of ${run.title}` : "";
    this.list(run);
    this.found(this.steps);
  }

  /** @param {Run} run */
  list(run) {
    const list = byId("matches");
    list.hidden = !this.steps.length;
    list.replaceChildren(...this.steps.slice(0, MAX_LISTED).map((step, number) => element("li", {},
      namedLink(run.name(step), () => this.show(number)),
      ` ${run.part(step)}, step ${run.number(step)}`)));
    if (this.steps.length > MAX_LISTED) list.append(element("li", {}, `${this.steps.length - MAX_LISTED} more`));
  }

  next() {
    if (this.steps.length) this.show((this.at + 1) % this.steps.length);
  }

  /** @param {number} number of the step found */
  show(number) {
    this.at = number;
    this.go(this.runOf(), this.steps[number]);
  }
}
