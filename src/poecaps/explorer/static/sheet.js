// The traversal sheet: each parameter of the chosen expert × 7 steps.

import { byId, make } from "./dom.js";
import { paint } from "./paint.js";

export const STEPS = [-3, -2, -1, 0, 1, 2, 3];
const LYING = matchMedia("(min-width: 1120px)"); // as in style.css: a column for each parameter
const KEYS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

const named = (step) => (step < 0 ? `−${-step}` : `${step}`);

export class Sheet {
  /** `go(parameter, step)` is called when a picture of the sheet is chosen. */
  constructor(go) {
    this.go = go;
    this.cells = [];
  }

  build(parameters) {
    this.cells = Array.from({ length: parameters }, (_, d) => STEPS.map((step, s) => this.#cell(d, step, d === 0 && s === 3)));
    const corner = make("span", { aria: { role: "columnheader" } }, "");
    const head = make("div", { className: "sheet-row", aria: { role: "row" } }, corner,
      ...STEPS.map((step) => make("span", { aria: { role: "columnheader" } }, named(step))));
    const rows = this.cells.map((cells, d) => make("div", { className: "sheet-row", aria: { role: "row" } },
      make("span", { aria: { role: "rowheader" } }, `${d}`),
      ...cells.map((cell) => make("div", { aria: { role: "gridcell" } }, cell))));
    byId("sheet").replaceChildren(head, ...rows);
  }

  show(pixels, shape) {
    const size = shape.reduce((a, b) => a * b);
    this.cells.flat().forEach((cell, i) => paint(cell.firstChild, pixels.subarray(i * size, (i + 1) * size), shape));
    byId("sheet").classList.remove("stale");
  }

  /** Mark where the sliders stand. */
  mark(offsets) {
    this.cells.forEach((cells, d) => cells.forEach((cell, s) => {
      cell.setAttribute("aria-pressed", Math.abs((offsets[d] ?? 0) - STEPS[s]) < 0.5);
    }));
    byId("sheet").classList.add("stale");
  }

  #cell(d, step, first) {
    const label = `Parameter ${d} at ${named(step)} standard deviations`;
    const cell = make("button", { type: "button", tabIndex: first ? 0 : -1, aria: { label } }, make("canvas"));
    cell.addEventListener("click", () => this.go(d, step));
    cell.addEventListener("focus", () => {
      for (const each of this.cells.flat()) each.tabIndex = each === cell ? 0 : -1;
    });
    cell.addEventListener("keydown", (event) => {
      if (!(event.key in KEYS)) return;
      event.preventDefault();
      const [down, right] = LYING.matches ? KEYS[event.key].toReversed() : KEYS[event.key];
      this.cells[d + down]?.[STEPS.indexOf(step) + right]?.focus();
    });
    return cell;
  }
}
