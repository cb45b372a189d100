"use strict";

const FIRST_READERS = 3;

/**
 * The tables beneath the pictures, all of the schedule.
 * @param {Run} run @param {Data} data @param {(run: Run, step: number) => void} go
 */
function fillTables(run, data, go) {
  /** @param {number} step */
  const link = (step) => namedLink(run.name(step), () => go(run, step));
  byId("values").append(valuesTable(run, data, link));
  byId("ways").append(...waysTable(run, data, link));
  byId("again").append(...againTable(run, link));
}

/** @param {string} text */
const paragraph = (text) => element("p", {}, text);

/**
 * Every value that the schedule computes: what becomes of it, who writes and who reads it.
 * @param {Run} run @param {Data} data @param {(step: number) => HTMLElement} link
 */
function valuesTable(run, data, link) {
  const rows = valueRows(run, data);
  const caption = "What the schedule does with each value";
  const table = new SortableTable(caption, [
    { title: "Value", key: (row) => row.name, cell: (row) => named(row.name) },
    { title: "Size", key: (row) => row.bytes, cell: (row) => formatBytes(row.bytes), isNumber: true, largestFirst: true },
    { title: "Layout", key: (row) => row.layout },
    { title: "What becomes of it", key: (row) => row.fate },
    { title: "Written by", key: (row) => run.name(row.writer), cell: (row) => link(row.writer) },
    { title: "Read by", key: (row) => row.readers.length, cell: (row) => readersCell(run, row.readers, link) },
  ], rows, (row) => row.name);
  const built = table.build(caption);
  table.sort(1);
  return built;
}

/**
 * @typedef {object} ValueRow
 * @property {string} name
 * @property {number} bytes
 * @property {string} layout
 * @property {string} fate
 * @property {number} writer the step that writes it first
 * @property {number[]} readers the first step of each operator that reads it
 */

/** @param {Run} run @param {Data} data @returns {ValueRow[]} */
function valueRows(run, data) {
  /** @type {Map<number, ValueRow>} */
  const rows = new Map();
  run.stays.value.forEach((value, stay) => {
    const begin = run.stays.begin[stay];
    const { name, bytes, layout } = run.tensor(stay, begin);
    const row = rows.get(value) ?? { name, bytes, layout, fate: data.texts[data.fates[value]], writer: begin, readers: [] };
    row.readers.push(...run.stays.reads[stay]);
    rows.set(value, row);
  });
  for (const row of rows.values()) {
    row.readers.sort((a, b) => a - b);
    const names = row.readers.map((step) => run.name(step));
    row.readers = row.readers.filter((_, number) => names.indexOf(names[number]) === number);
  }
  return [...rows.values()];
}

/** @param {Run} run @param {number[]} readers @param {(step: number) => HTMLElement} link */
function readersCell(run, readers, link) {
  const cell = element("span");
  readers.slice(0, FIRST_READERS).forEach((step, number) => cell.append(number ? ", " : "", link(step)));
  if (readers.length > FIRST_READERS) cell.append(`, ${readers.length - FIRST_READERS} more`);
  if (!readers.length) cell.append("nothing");
  return cell;
}

/**
 * Steps that are not run by their operator's default implementation, and what that is worth.
 * @param {Run} run @param {Data} data @param {(step: number) => HTMLElement} link @returns {HTMLElement[]}
 */
function waysTable(run, data, link) {
  const { step: steps, default_latency_ms: latencies, default_workspace_bytes: workspaces } = data.other_ways;
  const rows = steps.map((step, number) => ({
    step,
    ms: run.latencyMs(step) - latencies[number],
    bytes: run.columns.workspace_bytes[step] - workspaces[number],
    taken: run.takenOver(step).reduce((sum, stay) => sum + run.values.bytes[run.stays.value[stay]], 0),
  }));
  if (!rows.length) return [paragraph("Every step is run by its operator's default implementation.")];
  const caption = "Steps run by another implementation than the default";
  const table = new SortableTable(caption, [
    { title: "Step", key: (row) => run.number(row.step), isNumber: true },
    { title: "Operator", key: (row) => run.name(row.step), cell: (row) => link(row.step) },
    { title: "Implementation", key: (row) => run.implementation(row.step), cell: (row) => named(run.implementation(row.step)) },
    { title: "Pass", key: (row) => run.part(row.step) },
    { title: "Overhead", key: (row) => row.ms, cell: (row) => signed(row.ms, formatMs), isNumber: true, largestFirst: true },
    { title: "Workspace", key: (row) => row.bytes, cell: (row) => signed(row.bytes, formatBytes), isNumber: true, largestFirst: true },
    { title: "Overwritten", key: (row) => row.taken, cell: (row) => formatBytes(row.taken), isNumber: true, largestFirst: true },
  ], rows, (row) => `${run.name(row.step)} ${run.implementation(row.step)}`);
  const built = table.build(caption);
  table.sort(0);
  const total = rows.reduce((sum, row) => sum + row.ms, 0);
  return [paragraph(`${counted(rows.length, "step")}; ${signed(total, formatMs)} in all, against the default `
    + "implementations. What they save is memory: less workspace, or their result in place of what they read."), built];
}

/**
 * Steps that plain training does not take, and what they take.
 * @param {Run} run @param {(step: number) => HTMLElement} link @returns {HTMLElement[]}
 */
function againTable(run, link) {
  const rows = againRows(run);
  if (!rows.length) return [paragraph("Nothing is run again: the schedule stores all that the backward pass reads.")];
  const caption = "Steps that plain training does not take";
  const table = new SortableTable(caption, [
    { title: "Step", key: (row) => run.number(row.step), isNumber: true },
    { title: "Operator", key: (row) => run.name(row.step), cell: (row) => link(row.step) },
    { title: "Why", key: (row) => row.why },
    { title: "Implementation", key: (row) => run.implementation(row.step), cell: (row) => named(run.implementation(row.step)) },
    { title: "Before", key: (row) => row.before, cell: (row) => (row.before < run.count ? link(row.before) : "the end") },
    { title: "Overhead", key: (row) => run.latencyMs(row.step), cell: (row) => formatMs(run.latencyMs(row.step)), isNumber: true, largestFirst: true },
  ], rows, (row) => run.name(row.step));
  const built = table.build(caption);
  table.sort(0);
  return [paragraph(againSummary(run, rows)), built];
}

/** @param {Run} run */
function againRows(run) {
  const found = [];
  let before = run.count;
  for (let step = run.count - 1; step >= 0; step--) {
    const part = run.part(step);
    if (part === "run again" || part === "extra") {
      found.push({ step, before, part, why: part === "extra" ? "extra: plain training never runs it" : "run again" });
    } else {
      before = step;
    }
  }
  return found.reverse();
}

/** @param {Run} run @param {{step: number, part: string}[]} rows */
function againSummary(run, rows) {
  /** @param {string} part */
  const of = (part) => rows.filter((row) => row.part === part);
  /** @param {{step: number}[]} some */
  const ms = (some) => formatMs(some.reduce((sum, row) => sum + run.latencyMs(row.step), 0));
  const [again, extra] = [of("run again"), of("extra")];
  return `${counted(again.length, "step")} run again, ${ms(again)}; ${counted(extra.length, "extra step")} `
    + `that plain training never takes, ${ms(extra)}.`;
}
