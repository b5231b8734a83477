// The panel that encodes an image: a drawing, a file or a test image.

import * as api from "./api.js";
import { clear, drawHeatMap, drawPixels, readPicture, Sketch, toPng } from "./canvas.js";
import { byId, clearError, create, debounce, showError } from "./dom.js";

const clamp = (value, least, greatest) => Math.min(Math.max(value, least), greatest);

export class Encoder {
  #latest = new api.LatestRequest();
  #source = null; // of the current image, so that it can be encoded again with other options
  encoding = null;

  /**
   * `page` has the model and the state. `onChange()` is called when the state has changed,
   * `onSelect(expert)` when an expert is selected.
   */
  constructor(page, onChange, onSelect) {
    this.page = page;
    this.onChange = onChange;
    this.onSelect = onSelect;
    const sketch = { test: null, read: () => this.sketch.toPng(), isDrawing: true };
    this.sketch = new Sketch(byId("sketch"), debounce(60, () => this.#encode(sketch)));
    byId("clear").addEventListener("click", () => this.reset());
    byId("choose-file").addEventListener("click", () => byId("file").click());
    byId("file").addEventListener("change", () => {
      this.open(byId("file").files[0]);
      byId("file").value = "";
    });
    for (const id of ["centre", "invert"]) {
      byId(id).addEventListener("change", () => this.#source && this.#encode(this.#source));
    }
    byId("show-heat").addEventListener("change", () => this.showHeatMap());
    byId("test").addEventListener("submit", (event) => {
      event.preventDefault();
      const index = byId("test-index");
      if (index.reportValidity()) this.openTestImage(index.valueAsNumber);
    });
    byId("test-random").addEventListener("click", () =>
      this.openTestImage(Math.floor(Math.random() * page.model.test_images)));
    this.#acceptDrops();
    this.#frameReceptiveFields();
  }

  /** Start with another model. */
  build(model) {
    byId("test").hidden = model.test_images === 0;
    byId("test-index").max = model.test_images - 1;
    byId("centre").checked = model.image_shape[0] === 1;
    this.reset();
  }

  reset() {
    this.#latest.cancel();
    this.#source = this.encoding = null;
    Object.assign(this.page.state, { test: null, pixels: null });
    this.sketch.clear();
    for (const id of ["seen", "heat", "reconstruction"]) clear(byId(id));
    byId("firing").replaceChildren(create("p", { className: "hint" }, "No image yet."));
    byId("load").disabled = true;
    byId("free-energy").hidden = true;
    byId("heat-caption").textContent = "Input of the model";
    clearError();
    this.onChange();
  }

  open(file) {
    if (file) this.#encode({ test: null, read: () => readPicture(file) });
  }

  openTestImage(index) {
    byId("test-index").value = index;
    const read = (signal) => api.testImage(this.page.model.name, index, signal);
    this.#encode({ test: index, read, isInput: true });
  }

  /** Open the image of a link. */
  restore({ test, pixels }) {
    const shape = this.page.model.image_shape;
    if (test !== null && test < this.page.model.test_images) this.openTestImage(test);
    else if (pixels?.length === shape.reduce((a, b) => a * b)) {
      this.#encode({ test: null, read: () => toPng(pixels, shape), isInput: true });
    }
  }

  /** Encode the image of a source; one that is already an input of the model is not changed. */
  #encode(source) {
    const options = {
      centre: byId("centre").checked && !source.isInput,
      invert: byId("invert").checked && !source.isInput && !source.isDrawing,
    };
    this.#latest.run(async (signal) => {
      const blob = await source.read(signal);
      const encoding = await api.encode(this.page.model.name, blob, options, signal);
      if (!source.isDrawing && !signal.aborted) await this.sketch.show(blob);
      return encoding;
    }, (encoding) => {
      this.#source = source;
      this.encoding = encoding;
      const pixels = Uint8Array.from(encoding.image.flat(2));
      Object.assign(this.page.state, { test: source.test, pixels });
      clearError();
      this.#show();
    }, showError);
  }

  #show() {
    const { encoding: { firing, free_energy: energy, reconstruction }, page } = this;
    drawPixels(byId("seen"), page.state.pixels, page.model.image_shape);
    drawPixels(byId("reconstruction"), reconstruction.flat(2), page.model.image_shape);
    const strongest = firing.indexOf(Math.max(...firing));
    byId("seen").setAttribute("aria-label", `Input of the model; expert ${strongest} fires most`);
    byId("reconstruction").setAttribute("aria-label", "Reconstruction of the input");
    byId("free-energy").textContent = `free energy ${energy.toFixed(2).replace("-", "−")}`;
    byId("free-energy").hidden = false;
    byId("load").disabled = false;
    byId("firing").replaceChildren(...firing.map((value, expert) => this.#bar(expert, value)));
    this.showChosen();
    this.onChange();
  }

  #bar(expert, value) {
    const bar = create("span", { className: "bar" });
    bar.style.setProperty("--share", value);
    const label = `Expert ${expert} fires with probability ${value.toFixed(2)}`;
    const onclick = () => this.onSelect(expert);
    const properties = { type: "button", title: label, aria: { label }, onclick };
    return create("button", properties, bar, create("span", {}, `${expert}`));
  }

  /** Mark the selected expert, and show its routing coefficients. */
  showChosen() {
    [...byId("firing").children].forEach((bar, expert) => {
      if (bar.tagName === "BUTTON") {
        bar.setAttribute("aria-pressed", expert === this.page.state.chosen);
      }
    });
    this.showHeatMap();
  }

  showHeatMap() {
    const { encoding, page: { state: { chosen } } } = this;
    byId("field").hidden = true;
    if (!encoding) return;
    const isShown = byId("show-heat").checked;
    byId("heat").hidden = !isShown;
    const [least, greatest] = drawHeatMap(byId("heat"), encoding.routing[chosen]);
    byId("heat-caption").textContent = isShown
      ? `Routing to expert ${chosen}: ${least.toFixed(2)} to ${greatest.toFixed(2)}`
      : "Input of the model";
  }

  /** Frame the receptive field of the position of the heat map under the pointer. */
  #frameReceptiveFields() {
    const frame = byId("seen").parentElement;
    frame.addEventListener("pointermove", (event) => {
      if (!this.encoding || byId("heat").hidden) return;
      const { grid: [rows, columns], field, stride, image_shape: shape } = this.page.model;
      const [, height, width] = shape;
      const box = frame.getBoundingClientRect();
      const x = (event.clientX - box.left) / box.width;
      const y = (event.clientY - box.top) / box.height;
      const row = clamp(Math.floor(y * rows), 0, rows - 1);
      const column = clamp(Math.floor(x * columns), 0, columns - 1);
      const square = byId("field");
      square.hidden = false;
      square.style.top = `${100 * stride * row / height}%`;
      square.style.left = `${100 * stride * column / width}%`;
      square.style.height = `${100 * field / height}%`;
      square.style.width = `${100 * field / width}%`;
      const value = this.encoding.routing[this.page.state.chosen][row][column].toFixed(2);
      byId("heat-caption").textContent = `Row ${row}, column ${column}: ${value} (field framed)`;
    });
    frame.addEventListener("pointerleave", () => this.showHeatMap());
  }

  #acceptDrops() {
    const mark = (isOver) => document.body.classList.toggle("dropping", isOver);
    addEventListener("dragover", (event) => {
      event.preventDefault();
      mark(true);
    });
    addEventListener("dragleave", (event) => {
      if (!event.relatedTarget) mark(false);
    });
    addEventListener("drop", (event) => {
      event.preventDefault();
      mark(false);
      this.open(event.dataTransfer.files[0]);
    });
  }
}
