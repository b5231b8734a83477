// What the model sees in an image that a person draws, drops or takes.

import * as api from "./api.js";
import { afterwards, byId, complain, forgive, make } from "./dom.js";
import { clear, paint, paintHeat, readFile, Sketch, toBlob } from "./paint.js";

export class Encoder {
  #latest = new api.Latest();
  #source = null; // gives the picture that is shown, to look at it again
  answer = null;

  /** `page` gives model and state; `seen()` is called when they changed, `choose(expert)` when an expert is chosen. */
  constructor(page, seen, choose) {
    this.page = page;
    this.seen = seen;
    this.choose = choose;
    const soon = afterwards(60, () => this.#look({ test: null, read: () => this.sketch.toBlob(), drawn: true }));
    this.sketch = new Sketch(byId("sketch"), soon);
    byId("clear").addEventListener("click", () => this.forget());
    byId("choose-file").addEventListener("click", () => byId("file").click());
    byId("file").addEventListener("change", () => {
      this.open(byId("file").files[0]);
      byId("file").value = "";
    });
    for (const id of ["centre", "invert"]) byId(id).addEventListener("change", () => this.#source && this.#look(this.#source));
    byId("show-heat").addEventListener("change", () => this.showHeat());
    byId("test").addEventListener("submit", (event) => {
      event.preventDefault();
      if (byId("test-index").reportValidity()) this.takeTest(byId("test-index").valueAsNumber);
    });
    byId("test-random").addEventListener("click", () => this.takeTest(Math.floor(Math.random() * page.model.test_images)));
    this.#acceptDrops();
    this.#pointAtCells();
  }

  /** Begin with another model. */
  build(model) {
    byId("test").hidden = model.test_images === 0;
    byId("test-index").max = model.test_images - 1;
    byId("centre").checked = model.image_shape[0] === 1;
    this.forget();
  }

  forget() {
    this.#latest.cancel();
    this.#source = this.answer = null;
    Object.assign(this.page.state, { test: null, pixels: null });
    this.sketch.clear();
    for (const id of ["seen", "heat", "reconstruction"]) clear(byId(id));
    byId("firing").replaceChildren(make("p", { className: "hint" }, "Nothing to see yet."));
    byId("load").disabled = true;
    byId("free-energy").hidden = true;
    byId("heat-caption").textContent = "What the model sees";
    forgive();
    this.seen();
  }

  open(file) {
    if (file) this.#look({ test: null, read: () => readFile(file) });
  }

  takeTest(index) {
    byId("test-index").value = index;
    this.#look({ test: index, read: (signal) => api.testImage(this.page.model.name, index, signal), asItIs: true });
  }

  /** Look at what a link holds. */
  restore({ test, pixels }) {
    const [channels, height, width] = this.page.model.image_shape;
    if (test !== null && test < this.page.model.test_images) this.takeTest(test);
    else if (pixels?.length === channels * height * width) {
      this.#look({ test: null, read: () => toBlob(pixels, this.page.model.image_shape), asItIs: true });
    }
  }

  #look(source) {
    const options = {
      centre: byId("centre").checked && !source.asItIs,
      invert: byId("invert").checked && !source.asItIs && !source.drawn,
    };
    this.#latest.run(async (signal) => {
      const blob = await source.read(signal);
      const answer = await api.encode(this.page.model.name, blob, options, signal);
      if (!source.drawn && !signal.aborted) await this.sketch.show(blob);
      return answer;
    }, (answer) => {
      this.#source = source;
      this.answer = answer;
      Object.assign(this.page.state, { test: source.test, pixels: Uint8Array.from(answer.image.flat(2)) });
      forgive();
      this.#show();
    }, complain);
  }

  #show() {
    const { answer, page } = this;
    paint(byId("seen"), page.state.pixels, page.model.image_shape);
    paint(byId("reconstruction"), answer.reconstruction.flat(2), page.model.image_shape);
    const strongest = answer.firing.indexOf(Math.max(...answer.firing));
    byId("seen").setAttribute("aria-label", `What the model sees; expert ${strongest} fires most`);
    byId("reconstruction").setAttribute("aria-label", "Reconstruction of what the model sees");
    byId("free-energy").textContent = `free energy ${answer.free_energy.toFixed(2).replace("-", "−")}`;
    byId("free-energy").hidden = false;
    byId("load").disabled = false;
    byId("firing").replaceChildren(...answer.firing.map((value, expert) => this.#bar(expert, value)));
    this.showChosen();
    this.seen();
  }

  #bar(expert, value) {
    const bar = make("span", { className: "bar" });
    bar.style.setProperty("--share", value);
    const label = `Expert ${expert} fires with probability ${value.toFixed(2)}`;
    return make("button", { type: "button", title: label, aria: { label }, onclick: () => this.choose(expert) },
      bar, make("span", {}, `${expert}`));
  }

  /** Mark the chosen expert, and where it listens. */
  showChosen() {
    [...byId("firing").children].forEach((bar, expert) => {
      if (bar.tagName === "BUTTON") bar.setAttribute("aria-pressed", expert === this.page.state.chosen);
    });
    this.showHeat();
  }

  showHeat() {
    const { answer, page } = this;
    byId("field").hidden = true;
    if (!answer) return;
    byId("heat").hidden = !byId("show-heat").checked;
    const [least, most] = paintHeat(byId("heat"), answer.routing[page.state.chosen]);
    byId("heat-caption").textContent = byId("show-heat").checked
      ? `Expert ${page.state.chosen} listens: ${least.toFixed(2)} to ${most.toFixed(2)}` : "What the model sees";
  }

  /** Show the square of pixels that a position of the heat map sees. */
  #pointAtCells() {
    const frame = byId("seen").parentElement;
    frame.addEventListener("pointermove", (event) => {
      if (!this.answer || byId("heat").hidden) return;
      const { grid: [rows, columns], field, stride, image_shape: [, height, width] } = this.page.model;
      const box = frame.getBoundingClientRect();
      const row = Math.min(Math.max(Math.floor((event.clientY - box.top) / box.height * rows), 0), rows - 1);
      const column = Math.min(Math.max(Math.floor((event.clientX - box.left) / box.width * columns), 0), columns - 1);
      const square = byId("field");
      square.hidden = false;
      square.style.top = `${100 * stride * row / height}%`;
      square.style.left = `${100 * stride * column / width}%`;
      square.style.height = `${100 * field / height}%`;
      square.style.width = `${100 * field / width}%`;
      const value = this.answer.routing[this.page.state.chosen][row][column];
      byId("heat-caption").textContent = `Row ${row}, column ${column}: ${value.toFixed(2)}, sees the framed pixels`;
    });
    frame.addEventListener("pointerleave", () => this.showHeat());
  }

  #acceptDrops() {
    const mark = (on) => document.body.classList.toggle("dropping", on);
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
