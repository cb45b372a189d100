"use strict";

/**
 * What the page is drawn from. Texts are by their number in `texts`, holdings and parts by their position.
 * @typedef {object} Data
 * @property {string[]} texts
 * @property {string[]} holdings  what memory is held for, from the bottom of the stack
 * @property {string[]} parts
 * @property {number} budget_bytes
 * @property {TradeoffData | null} tradeoff
 * @property {number} first_step  the number of the first step, as people read it
 * @property {{operators: Record<OperatorColumn, number[]>, values: ValueColumns}[]} graphs
 * @property {RunColumns} scheduled
 * @property {RunColumns} plain
 * @property {number[]} fates  of each value in the schedule; -1 where it is never computed
 * @property {{step: number[], default_latency_ms: number[], default_workspace_bytes: number[]}} other_ways
 *
 * @typedef {"name" | "family" | "module" | "source"} OperatorColumn
 * @typedef {{name: number[], bytes: number[], shape: number[], dtype: number[], held: number[]}} ValueColumns
 *
 * Steps in order; `always_bytes` by holding.
 * @typedef {object} RunColumns
 * @property {number} graph
 * @property {number[]} operator
 * @property {number[]} implementation
 * @property {number[]} part
 * @property {number[]} latency_ms
 * @property {number[]} workspace_bytes
 * @property {number} backward_begins
 * @property {number} peak_step
 * @property {number[]} always_bytes
 * @property {Stays} stays
 *
 * Each stay of a value in memory, from one step to another, in the order in which they begin.
 * @typedef {object} Stays
 * @property {number[]} value
 * @property {number[]} holding
 * @property {number[]} begin
 * @property {number[]} end
 * @property {number[]} overwritten  1 where the last step takes its memory over
 * @property {number[][]} reads
 */

/**
 * A value's stay in memory, at one step.
 * @typedef {object} Tensor
 * @property {string} name
 * @property {number} bytes
 * @property {string} layout  shape and dtype
 * @property {number} holding
 * @property {number} since  the step that wrote it
 * @property {number} next  the step that reads it next; -1 if none does
 * @property {string[]} here  what the step does with it
 * @property {string} held  why it stays until the step ends; empty if it does not
 */

/** One training step, scheduled or plain: its operators one by one, and what memory holds at each. */
class Run {
  /** @param {"scheduled" | "plain"} id @param {Data} data */
  constructor(id, data) {
    const columns = data[id];
    const graph = data.graphs[columns.graph];
    this.id = id;
    this.label = id === "plain" ? "Plain training" : "Schedule";
    this.title = id === "plain" ? "plain training" : "the schedule";
    this.texts = data.texts;
    this.holdings = data.holdings;
    this.parts = data.parts;
    this.operators = graph.operators;
    this.values = graph.values;
    this.columns = columns;
    this.stays = columns.stays;
    this.count = columns.operator.length;
    this.firstStep = data.first_step;
    this.peakStep = columns.peak_step;
    this.startMs = this.accumulatedLatencies();
    this.bytesOf = this.splitBytes();
    this.totals = this.sumOf(this.holdings.map((_, holding) => holding));
    this.stepsOf = this.stepsByName();
  }

  /** When each step begins, and when the last one ends, in ms. */
  accumulatedLatencies() {
    const starts = new Float64Array(this.count + 1);
    this.columns.latency_ms.forEach((ms, step) => { starts[step + 1] = starts[step] + ms; });
    return starts;
  }

  /** For each holding, the bytes at each step. A value that is overwritten gives up its memory to the step that does. */
  splitBytes() {
    const { value, holding, begin, end, overwritten } = this.stays;
    const workspace = this.holdings.indexOf("workspace");
    const changes = this.holdings.map(() => new Float64Array(this.count + 1));
    value.forEach((index, stay) => {
      const bytes = this.values.bytes[index];
      changes[holding[stay]][begin[stay]] += bytes;
      changes[holding[stay]][end[stay] + (overwritten[stay] ? 0 : 1)] -= bytes;
    });
    return changes.map((changed, kind) => {
      let held = this.columns.always_bytes[kind];
      if (kind === workspace) return Float64Array.from(this.columns.workspace_bytes, (bytes) => held + bytes);
      return changed.subarray(0, this.count).map((change) => (held += change));
    });
  }

  /** The bytes at each step of some of the holdings. @param {number[]} holdings */
  sumOf(holdings) {
    const sums = new Float64Array(this.count);
    for (const holding of holdings) {
      const bytes = this.bytesOf[holding];
      for (let step = 0; step < this.count; step++) sums[step] += bytes[step];
    }
    return sums;
  }

  /** The steps at which each operator runs. */
  stepsByName() {
    /** @type {Map<string, number[]>} */
    const found = new Map();
    for (let step = 0; step < this.count; step++) {
      const steps = found.get(this.name(step));
      if (steps) steps.push(step);
      else found.set(this.name(step), [step]);
    }
    return found;
  }

  /** A step's number, as people read it. @param {number} step */
  number(step) { return step + this.firstStep; }

  /** In words, with the number of steps. @param {number} step */
  place(step) { return `step ${this.number(step)} of ${this.count}`; }

  /** The operator that a step runs. @param {number} step */
  name(step) { return this.operatorText("name", step); }

  /** @param {OperatorColumn} column @param {number} step @returns {string} */
  operatorText(column, step) { return this.texts[this.operators[column][this.columns.operator[step]]]; }

  /** @param {number} step @returns {string} */
  implementation(step) { return this.texts[this.columns.implementation[step]]; }

  /** @param {number} step @returns {string} */
  part(step) { return this.parts[this.columns.part[step]]; }

  /** @param {number} step @returns {number} */
  latencyMs(step) { return this.columns.latency_ms[step]; }

  /** Where a step begins on the horizontal axis. @param {"time" | "step"} unit @param {number} step */
  edge(unit, step) { return unit === "time" ? this.startMs[step] : step; }

  /** The step at a place on the horizontal axis, or the nearest one. @param {"time" | "step"} unit @param {number} at */
  stepAt(unit, at) {
    let low = 0;
    let high = this.count - 1;
    while (low < high) {
      const middle = Math.ceil((low + high) / 2);
      if (this.edge(unit, middle) <= at) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /** What is in memory at a step beside what always is and its workspace, largest first. @param {number} step */
  tensors(step) {
    const { begin, end, overwritten, value } = this.stays;
    const found = [];
    for (let stay = 0; stay < begin.length && begin[stay] <= step; stay++) {
      if (end[stay] > step || (end[stay] === step && !overwritten[stay])) found.push(stay);
    }
    return found.sort((a, b) => this.values.bytes[value[b]] - this.values.bytes[value[a]]);
  }

  /** The stays whose memory a step takes over for its results. @param {number} step */
  takenOver(step) {
    const { end, overwritten } = this.stays;
    return end.flatMap((at, stay) => (at === step && overwritten[stay] ? [stay] : []));
  }

  /** @param {number} stay @returns {string} */
  valueName(stay) { return this.texts[this.values.name[this.stays.value[stay]]]; }

  /** @param {number} stay @param {number} step @returns {Tensor} */
  tensor(stay, step) {
    const { value, holding, begin } = this.stays;
    const index = value[stay];
    const reads = this.stays.reads[stay];
    const held = this.texts[this.values.held[index]];
    const next = reads.find((at) => at > step) ?? -1;
    const here = [];
    if (begin[stay] === step) here.push("written here");
    if (reads.includes(step)) here.push(next < 0 && !held ? "read here for the last time" : "read here");
    if (!reads.length && !held) here.push("nothing reads it");
    return {
      name: this.valueName(stay),
      bytes: this.values.bytes[index],
      layout: `${this.texts[this.values.shape[index]]} ${this.texts[this.values.dtype[index]]}`.trim(),
      holding: holding[stay],
      since: begin[stay],
      next,
      here,
      held,
    };
  }
}
