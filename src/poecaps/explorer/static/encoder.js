// The panel that encodes an image: a drawing, a file or an image of the data.
//
// A source of an image is { test, blob, load, isInput, isDrawing, invert }: the number of an image
// of the data or null; the picture, or a function that loads it; whether it is already an input of
// the model; whether it was drawn here; and whether to invert its brightness, or null to detect it.

import * as api from "./api.js";
import { clear, drawHeatMap, drawPixels, readPicture, Sketch, toPng } from "./canvas.js";
import { byId, clearError, create, debounce, notify, showError } from "./dom.js";
import { LatestRequest } from "./requests.js";

const PART_LABELS = {
  test: "Test image", "held-out": "Held-out image", training: "Training image", other: "Image",
};
const UNIFORM = 1.05; // times the average: an expert that looks at all parts alike

const clamp = (value, least, greatest) => Math.min(Math.max(value, least), greatest);
const size = (shape) => shape.reduce((a, b) => a * b);

const isLight = (model) => model.background > 0.5;

export class Encoder {
  #latest = new LatestRequest();
  #sketched = null; // the picture on the sketch
  encoding = null;
  expert = 0; // of the heat map

  /**
   * `page` has the model and the state. `onChange()` is called when the state has changed,
   * `onSelect(expert)` when an expert is selected.
   */
  constructor(page, onChange, onSelect) {
    this.page = page;
    this.onChange = onChange;
    this.onSelect = onSelect;
    this.sketch = new Sketch(byId("sketch"), {
      onChange: debounce(60, () => this.#encodeDrawing()),
      onClear: () => this.reset(),
      onPen: (isDown) => notify(isDown ? "The pen is down." : "The pen is up."),
    });
    byId("clear").addEventListener("click", () => this.reset());
    byId("choose-file").addEventListener("click", () => byId("file").click());
    byId("file").addEventListener("change", () => {
      this.open(byId("file").files[0]);
      byId("file").value = "";
    });
    byId("centre").addEventListener("change", () => this.#encodeAgain({}));
    byId("invert").addEventListener("change", () =>
      this.#encodeAgain({ invert: byId("invert").checked }));
    byId("show-heat").addEventListener("change", () => this.showHeatMap());
    byId("test").addEventListener("submit", (event) => {
      event.preventDefault();
      const index = byId("test-index");
      if (index.reportValidity()) this.openTestImage(index.valueAsNumber);
    });
    byId("test-random").addEventListener("click", () =>
      this.openTestImage(Math.floor(Math.random() * page.model.images)));
    this.#acceptDrops();
    this.#frameReceptiveFields();
  }

  /** Start with another model. */
  build(model) {
    byId("test").hidden = model.images === 0;
    byId("test-label").textContent = PART_LABELS[model.part];
    byId("test-index").max = model.images - 1;
    byId("centre").checked = model.image_shape[0] === 1;
    this.#empty();
  }

  reset() {
    Object.assign(this.page.state, { test: null, pixels: null, source: null });
    this.#empty();
    clearError();
    this.onChange();
  }

  #empty() {
    this.#latest.cancel();
    this.encoding = null;
    this.sketch.clear(isLight(this.page.model));
    this.#sketched = null;
    for (const id of ["seen", "heat", "reconstruction"]) clear(byId(id));
    byId("seen").setAttribute("aria-label", "Input of the model: none yet");
    byId("reconstruction").setAttribute("aria-label", "Reconstruction: none yet");
    byId("firing").replaceChildren(create("p", { className: "hint" }, "No image yet."));
    byId("load").disabled = true;
    byId("free-energy").hidden = true;
    byId("heat-caption").textContent = "Input of the model";
    Object.assign(byId("invert"), { checked: false, disabled: true });
    byId("inverted").replaceChildren();
  }

  open(file) {
    if (file) this.#encode({ test: null, load: () => readPicture(file), invert: null });
  }

  openTestImage(index) {
    byId("test-index").value = index;
    const load = (signal) => api.testImage(this.page.model.name, index, signal);
    this.#encode({ test: index, load, isInput: true });
  }

  /** Show the image of the state, which may be that of a link. */
  restore() {
    const { test, pixels, source } = this.page.state;
    const shape = this.page.model.image_shape;
    if (source) {
      if (source !== this.encoding?.source) this.#encode(source);
    } else if (test !== null && test < this.page.model.images) this.openTestImage(test);
    else if (pixels?.length === size(shape)) {
      this.#encode({ test: null, load: () => toPng(pixels, shape), isInput: true });
    } else this.reset();
  }

  /** Return the source of the current image for another model, or null. */
  sourceFor(shape) {
    const { source } = this.page.state;
    if (!source?.blob) return null;
    const isSame = `${shape}` === `${this.page.model.image_shape}`;
    return { ...source, test: null, load: null, isInput: source.isInput && isSame };
  }

  async #encodeDrawing() {
    const blob = this.#sketched = await this.sketch.toPng();
    this.#encode({ test: null, blob, isDrawing: true, isLight: this.sketch.isLight });
  }

  #encodeAgain(changes) {
    const { source } = this.page.state;
    if (source && !source.isInput) this.#encode({ ...source, ...changes });
  }

  /** Encode the image of a source; one that is already an input of the model is not changed. */
  #encode(source) {
    const { model } = this.page;
    const canChange = !source.isInput && !source.isDrawing;
    const isOpposite = Boolean(source.isDrawing) && model.background !== null
      && source.isLight !== isLight(model);
    const options = {
      centre: byId("centre").checked && !source.isInput,
      invert: canChange ? source.invert ?? "auto" : isOpposite,
    };
    this.#latest.run(async (signal) => {
      const blob = source.blob ?? await source.load(signal);
      const encoding = await api.encode(this.page.model.name, blob, options, signal);
      if (blob !== this.#sketched && !signal.aborted) {
        await this.sketch.show(blob);
        this.#sketched = blob;
      }
      return { ...encoding, source: Object.assign(source, { blob }) };
    }, (encoding) => {
      this.encoding = encoding;
      const pixels = Uint8Array.from(encoding.image.flat(2));
      Object.assign(this.page.state, { test: source.test, pixels, source });
      Object.assign(byId("invert"), { checked: encoding.inverted, disabled: !canChange });
      byId("inverted").textContent = encoding.inverted && source.invert === null
        ? `${isLight(model) ? "Light on dark" : "Dark on light"}, unlike the images of this model: `
          + "inverted."
        : "";
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
    this.follow(strongest);
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

  /** Mark an expert, and show where it looks. */
  follow(expert) {
    this.expert = expert;
    [...byId("firing").querySelectorAll("button")].forEach((bar, each) =>
      bar.setAttribute("aria-pressed", each === expert));
    this.showHeatMap();
  }

  showHeatMap() {
    byId("field").hidden = true;
    if (!this.encoding) return;
    const isShown = byId("show-heat").checked;
    byId("heat").hidden = !isShown;
    const routing = this.encoding.routing[this.expert];
    drawHeatMap(byId("heat"), routing);
    const most = Math.max(...routing.flat().map((value) => this.#relative(value)));
    const text = most < UNIFORM ? `Expert ${this.expert} looks at all parts alike.`
      : `Where expert ${this.expert} looks: orange parts count up to ${most.toFixed(1)} times the `
        + "average.";
    byId("heat-caption").textContent = isShown ? text : "Input of the model";
  }

  /** Return how much a routing coefficient of the shown expert is above the average of all. */
  #relative(value) {
    const all = this.encoding.routing[this.expert].flat();
    return value * all.length / Math.max(all.reduce((a, b) => a + b), 1e-12);
  }

  /** Frame the receptive field of the position of the heat map under the pointer. */
  #frameReceptiveFields() {
    const frame = byId("seen").parentElement;
    frame.addEventListener("pointermove", (event) => {
      if (!this.encoding || byId("heat").hidden) return;
      const { grid: [rows, columns], field, stride, first_pixel: first } = this.page.model;
      const [, height, width] = this.page.model.image_shape;
      const box = frame.getBoundingClientRect();
      const x = (event.clientX - box.left) / box.width;
      const y = (event.clientY - box.top) / box.height;
      const row = clamp(Math.floor(y * rows), 0, rows - 1);
      const column = clamp(Math.floor(x * columns), 0, columns - 1);
      const square = byId("field");
      square.hidden = false;
      square.style.top = `${100 * (first + stride * row) / height}%`;
      square.style.left = `${100 * (first + stride * column) / width}%`;
      square.style.height = `${100 * field / height}%`;
      square.style.width = `${100 * field / width}%`;
      const share = this.#relative(this.encoding.routing[this.expert][row][column]);
      byId("heat-caption").textContent =
        `For expert ${this.expert}, the framed part counts ${share.toFixed(1)} times the average.`;
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
