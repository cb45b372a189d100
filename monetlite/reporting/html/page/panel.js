"use strict";

const FIRST_TENSORS = 25;

/** What is known of one step: its operator, what memory is held for, and the tensors that are in it. */
class Panel {
  /**
   * @param {HTMLElement} host
   * @param {number} budgetBytes
   * @param {(run: Run, step: number) => void} go
   * @param {() => void} keep keeps the step, or lets it go
   */
  constructor(host, budgetBytes, go, keep) {
    this.host = host;
    this.budgetBytes = budgetBytes;
    this.go = go;
    this.keep = keep;
  }

  /** @param {Run} run @param {number} step @param {boolean} kept */
  show(run, step, kept) {
    this.host.replaceChildren(
      element("p", { class: "where" }, `${capitalized(run.place(step))}, ${run.title}`,
        button(kept ? "Kept" : "Keep", this.keep, { "aria-pressed": String(kept), class: "keep" })),
      element("h3", {}, named(run.name(step))),
      this.operator(run, step),
      this.holdings(run, step),
      ...this.tensors(run, step),
    );
    this.host.scrollTop = 0;
  }

  /** @param {Run} run @param {number} step */
  operator(run, step) {
    const list = element("dl", { class: "operator" });
    /** @param {string} what @param {...(Node | string)} said */
    const add = (what, ...said) =>
      list.append(element("dt", {}, what), element("dd", {}, ...said));
    const module = run.operatorText("module", step);
    const source = run.operatorText("source", step);
    add("Module", module ? named(module) : "the model itself");
    if (source) add("Source", named(source));
    add("Operation", named(run.operatorText("family", step)));
    add("Implementation", named(run.implementation(step)));
    add("Pass", ...this.part(run, step));
    add("Latency", formatMs(run.latencyMs(step)));
    add("Workspace", formatBytes(run.columns.workspace_bytes[step]));
    const taken = run.takenOver(step);
    if (taken.length) add("Overwrites", ...this.joined(taken.map((stay) => named(run.valueName(stay)))));
    return list;
  }

  /** Forward, backward or again, with the steps that run the same operator. @param {Run} run @param {number} step */
  part(run, step) {
    const others = (run.stepsOf.get(run.name(step)) ?? []).filter((other) => other !== step);
    const part = run.part(step);
    const said = part === "extra" ? "extra: plain training does not run it" : part;
    if (!others.length) return [said];
    return [`${said}; also at step `, ...this.joined(others.map((other) => this.link(run, other)))];
  }

  /** @param {Node[]} nodes */
  joined(nodes) { return nodes.flatMap((node, number) => (number ? [", ", node] : [node])); }

  /** @param {Run} run @param {number} step */
  link(run, step) { return button(String(run.number(step)), () => this.go(run, step), { class: "link", title: run.name(step) }); }

  /** @param {Run} run @param {number} step */
  holdings(run, step) {
    const total = run.totals[step];
    const spare = this.budgetBytes - total;
    const within = spare >= 0 ? `${formatBytes(spare)} below the budget` : `${formatBytes(-spare)} over the budget`;
    const rows = run.holdings.flatMap((holding, kind) => {
      const bytes = run.bytesOf[kind][step];
      if (!bytes) return [];
      return [element("tr", { "data-holding": holding },
        element("th", { scope: "row" }, element("span", { class: `swatch ${colourOf(holding)}` }), holding),
        element("td", {}, formatBytes(bytes)))];
    });
    return element("table", { class: "holdings" },
      element("caption", {}, `In memory: ${formatBytes(total)}, ${within}`),
      element("tbody", {}, ...rows.reverse()));
  }

  /** @param {Run} run @param {number} step */
  tensors(run, step) {
    const stays = run.tensors(step);
    const bytes = stays.reduce((sum, stay) => sum + run.values.bytes[run.stays.value[stay]], 0);
    const list = element("ol", { class: "tensors", "aria-label": "Tensors in memory, largest first" });
    /** @param {number} from @param {number} to */
    const more = (from, to) =>
      list.append(...stays.slice(from, to).map((stay) => this.row(run, run.tensor(stay, step))));
    more(0, FIRST_TENSORS);
    const found = [element("h4", {}, `${counted(stays.length, "tensor")}, ${formatBytes(bytes)}`), list];
    if (stays.length > FIRST_TENSORS) {
      const rest = button(`Show all ${counted(stays.length, "tensor")}`, () => {
        more(FIRST_TENSORS, stays.length);
        rest.remove();
      }, { class: "more" });
      found.push(rest);
    }
    return found;
  }

  /** @param {Run} run @param {Tensor} tensor */
  row(run, tensor) {
    const holding = run.holdings[tensor.holding];
    return element("li", {},
      element("span", { class: `swatch ${colourOf(holding)}`, title: holding }),
      element("span", { class: "what" }, named(tensor.name)),
      element("span", { class: "size" }, formatBytes(tensor.bytes)),
      element("span", { class: "since" }, `${tensor.layout}, since step `, this.link(run, tensor.since)),
      element("span", { class: "why" }, ...this.why(run, tensor)));
  }

  /** Why a tensor is in memory: what the step does with it, what reads it next, what holds it. @param {Run} run @param {Tensor} tensor */
  why(run, tensor) {
    /** @type {(Node | string)[][]} */
    const reasons = tensor.here.map((reason) => [reason]);
    if (tensor.next >= 0) {
      reasons.push(["next read at step ", this.link(run, tensor.next), " by ", named(run.name(tensor.next))]);
    }
    if (tensor.held) reasons.push([tensor.held]);
    return reasons.flatMap((reason, number) => (number ? ["; ", ...reason] : reason));
  }
}
