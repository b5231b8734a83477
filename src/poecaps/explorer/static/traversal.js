// The traversal: each parameter of the selected expert at 7 offsets.

import { drawPixels } from "./canvas.js";
import { byId, create } from "./dom.js";

export const OFFSETS = [-3, -2, -1, 0, 1, 2, 3];
const TRANSPOSED = matchMedia("(min-width: 1120px)"); // as in style.css: a column per parameter
const KEYS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

const format = (offset) => (offset < 0 ? `−${-offset}` : `${offset}`);
const row = (...cells) =>
  create("div", { className: "sheet-row", aria: { role: "row" } }, ...cells);

export class Traversal {
  /** `onSelect(parameter, offset)` is called when a picture is selected. */
  constructor(onSelect) {
    this.onSelect = onSelect;
    this.cells = [];
  }

  build(parameters) {
    this.cells = Array.from({ length: parameters }, (_, d) =>
      OFFSETS.map((offset) => this.#cell(d, offset, d === 0 && offset === 0)));
    const columnHeader = (text) => create("span", { aria: { role: "columnheader" } }, text);
    const header = row(columnHeader(""), ...OFFSETS.map((offset) => columnHeader(format(offset))));
    const rows = this.cells.map((cells, d) => row(
      create("span", { aria: { role: "rowheader" } }, `${d}`),
      ...cells.map((cell) => create("div", { aria: { role: "gridcell" } }, cell)),
    ));
    byId("sheet").replaceChildren(header, ...rows);
  }

  show(pixels, shape) {
    const size = shape.reduce((a, b) => a * b);
    this.cells.flat().forEach((cell, i) =>
      drawPixels(cell.firstChild, pixels.subarray(i * size, (i + 1) * size), shape));
    byId("sheet").classList.remove("stale");
  }

  /** Mark the offsets of the sliders. */
  mark(offsets) {
    this.cells.forEach((cells, d) => cells.forEach((cell, i) => {
      cell.setAttribute("aria-pressed", Math.abs((offsets[d] ?? 0) - OFFSETS[i]) < 0.5);
    }));
    byId("sheet").classList.add("stale");
  }

  #cell(d, offset, isFirst) {
    const label = `Parameter ${d} at ${format(offset)} standard deviations`;
    const properties = { type: "button", tabIndex: isFirst ? 0 : -1, aria: { label } };
    const cell = create("button", properties, create("canvas"));
    cell.addEventListener("click", () => this.onSelect(d, offset));
    cell.addEventListener("focus", () => {
      for (const each of this.cells.flat()) each.tabIndex = each === cell ? 0 : -1;
    });
    cell.addEventListener("keydown", (event) => {
      if (!(event.key in KEYS)) return;
      event.preventDefault();
      const [down, right] = TRANSPOSED.matches ? KEYS[event.key].toReversed() : KEYS[event.key];
      this.cells[d + down]?.[OFFSETS.indexOf(offset) + right]?.focus();
    });
    return cell;
  }
}
