"use strict";

const PAGE_ROWS = 25;

/**
 * A column of a table.
 * @template T
 * @typedef {object} Column
 * @property {string} title
 * @property {(row: T) => string | number} key  what it is sorted by
 * @property {(row: T) => Node | string} [cell]  what is shown, where that is not the key
 * @property {boolean} [isNumber]  stands at the right
 * @property {boolean} [largestFirst]
 */

/**
 * Rows that can be sorted by any column, filtered by a text, and turned over in pages.
 * @template T
 */
class SortableTable {
  /** @param {string} caption @param {Column<T>[]} columns @param {T[]} rows @param {(row: T) => string} textOf what the filter looks in */
  constructor(caption, columns, rows, textOf) {
    this.columns = columns;
    this.rows = rows;
    this.textOf = textOf;
    this.sorted = rows;
    this.by = -1;
    this.descending = false;
    this.page = 0;
    this.filter = element("input", { type: "search", "aria-label": `Filter: ${caption}`, placeholder: "Filter by name" });
    this.heads = columns.map((column, number) =>
      element("th", { scope: "col", class: column.isNumber ? "number" : null, "aria-sort": "none" },
        button(column.title, () => this.sort(number))));
    this.body = element("tbody");
    this.place = element("output");
    this.previous = button("Previous", () => this.turn(-1));
    this.next = button("Next", () => this.turn(1));
    this.filter.addEventListener("input", () => this.arrange());
  }

  /** @param {string} caption @returns {HTMLElement} */
  build(caption) {
    const table = element("table", {}, element("caption", {}, caption),
      element("thead", {}, element("tr", {}, ...this.heads)), this.body);
    return element("div", { class: "sortable" },
      element("div", { class: "scroller", role: "region", tabindex: 0, "aria-label": caption }, table),
      element("div", { class: "pages" }, this.filter, this.previous, this.next, this.place));
  }

  /** Sorts by a column; by the same column again, the other way round. @param {number} number */
  sort(number) {
    this.descending = this.by === number ? !this.descending : Boolean(this.columns[number].largestFirst);
    this.by = number;
    this.heads.forEach((head, at) => {
      head.setAttribute("aria-sort", at !== number ? "none" : this.descending ? "descending" : "ascending");
    });
    this.arrange();
  }

  arrange() {
    const wanted = /** @type {HTMLInputElement} */ (this.filter).value.trim().toLowerCase();
    const { key } = this.columns[this.by];
    const direction = this.descending ? -1 : 1;
    this.sorted = this.rows
      .filter((row) => !wanted || this.textOf(row).toLowerCase().includes(wanted))
      .map((row) => ({ row, by: key(row) }))
      .sort((a, b) => direction * (a.by < b.by ? -1 : a.by > b.by ? 1 : 0))
      .map(({ row }) => row);
    this.page = 0;
    this.draw();
  }

  /** @param {number} pages */
  turn(pages) {
    this.page += pages;
    this.draw();
  }

  draw() {
    const first = this.page * PAGE_ROWS;
    const rows = this.sorted.slice(first, first + PAGE_ROWS);
    this.body.replaceChildren(...rows.map((row) => element("tr", {}, ...this.columns.map((column) =>
      element("td", { class: column.isNumber ? "number" : null }, column.cell ? column.cell(row) : String(column.key(row)))))));
    const last = first + rows.length;
    this.place.textContent = rows.length ? `${first + 1}–${last} of ${this.sorted.length}` : "nothing found";
    this.setEnabled(this.previous, first > 0);
    this.setEnabled(this.next, last < this.sorted.length);
  }

  /** @param {HTMLElement} control @param {boolean} enabled */
  setEnabled(control, enabled) { /** @type {HTMLButtonElement} */ (control).disabled = !enabled; }
}
