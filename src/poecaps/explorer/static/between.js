// The panel that interpolates between two images.

import * as api from "./api.js";
import { drawPixels } from "./canvas.js";
import { byId, clearError, create, notify, showError } from "./dom.js";
import { LatestRequest } from "./requests.js";
import { copyState, toCode } from "./state.js";

const STEPS = 17; // codes from start to end
const SHOWN = 2; // every so many of them is in the strip

export class Between {
  #latest = new LatestRequest();
  #draws = { start: new LatestRequest(), end: new LatestRequest() };
  #ends = { start: null, end: null }; // their codes
  #found = null;
  #isVisible = false;
  #isChanged = false;

  /**
   * `page` has the model and the state. `encodedCode()` returns the code of the encoded image or
   * null, `onSelect(code)` is called when an image is selected.
   */
  constructor(page, encodedCode, onSelect) {
    this.page = page;
    this.encodedCode = encodedCode;
    this.onSelect = onSelect;
    for (const end of ["start", "end"]) this.#buildEnd(end);
    byId("between-at").addEventListener("input", () => this.#showImage());
    byId("between-strip").replaceChildren(...Array.from({ length: (STEPS + 1) / SHOWN }, (_, i) => {
      const label = `Image at ${Math.round(100 * i * SHOWN / (STEPS - 1))} % of the way`;
      const onclick = () => this.#select(i * SHOWN);
      const properties = { type: "button", aria: { label }, onclick, disabled: true };
      return create("button", properties, create("canvas"));
    }));
    new IntersectionObserver(([entry]) => {
      this.#isVisible = entry.isIntersecting;
      this.#update();
    }).observe(byId("between-panel"));
  }

  #buildEnd(end) {
    const button = (text, code) => create("button", {
      type: "button", onclick: () => code().catch(showError),
    }, text);
    byId(`between-${end}`).append(
      create("canvas", { id: `between-${end}-image`, aria: { role: "img", label: `The ${end}` } }),
      button("Image above", async () => this.#set(end, toCode(copyState(this.page.state)))),
      button("Encoded image", async () => {
        const code = this.encodedCode();
        if (code) this.#set(end, code);
        else notify("Encode an image first, in the tab Encode.");
      }),
      button("Random", async () => this.#draw(end)),
    );
  }

  /** Start with another model. */
  build() {
    this.#ends = { start: null, end: null };
    this.#found = null;
    this.#isChanged = true;
    for (const each of [this.#latest, ...Object.values(this.#draws)]) each.cancel();
    this.#update();
  }

  #draw(end) {
    const { model, state } = this.page;
    const seed = Math.floor(Math.random() * 1_000_000);
    return this.#draws[end].run(
      (signal) => api.draw(model.name, "joint", state.chosen, seed, signal),
      (code) => this.#set(end, code),
      showError,
    );
  }

  #set(end, code) {
    this.#ends[end] = code;
    this.#isChanged = true;
    this.#update();
  }

  /** Interpolate between the ends, once the panel is in view; at first, from the image above. */
  #update() {
    if (!this.#isVisible || !this.#isChanged || !this.page.model) return;
    const { start, end } = this.#ends;
    if (!start) this.#set("start", toCode(copyState(this.page.state)));
    else if (!end) this.#draw("end");
    else {
      this.#isChanged = false;
      this.#latest.run(
        (signal) => api.interpolate(this.page.model.name, start, end, STEPS, signal),
        (found) => {
          clearError();
          this.#found = found;
          this.#show();
        },
        showError,
      );
    }
  }

  #pixels(step) {
    const size = this.page.model.image_shape.reduce((a, b) => a * b);
    return this.#found.images.subarray(step * size, (step + 1) * size);
  }

  #show() {
    const shape = this.page.model.image_shape;
    drawPixels(byId("between-start-image"), this.#pixels(0), shape);
    drawPixels(byId("between-end-image"), this.#pixels(STEPS - 1), shape);
    [...byId("between-strip").children].forEach((button, i) => {
      button.disabled = false;
      drawPixels(button.firstChild, this.#pixels(i * SHOWN), shape);
    });
    this.#showImage();
  }

  #showImage() {
    if (!this.#found) return;
    const slider = byId("between-at");
    const share = slider.valueAsNumber / (STEPS - 1);
    const text = `${Math.round(100 * share)} %`;
    slider.style.setProperty("--at", `${100 * share}%`);
    slider.setAttribute("aria-valuetext", text);
    slider.parentElement.querySelector(".value").textContent = text;
    drawPixels(byId("between-image"), this.#pixels(slider.valueAsNumber), this.page.model.image_shape);
  }

  #select(step) {
    byId("between-at").value = step;
    this.#showImage();
    this.onSelect(this.#found.codes[step]);
    notify("Loaded into the sliders.");
  }
}
