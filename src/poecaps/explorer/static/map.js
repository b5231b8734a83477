// The map of codes: thumbnails in the plane, and a mark that walks among them.

import * as api from "./api.js";
import { drawPixels } from "./canvas.js";
import { byId, clearError, showError } from "./dom.js";
import { LatestRequest, RequestStream } from "./requests.js";

const STEP = 0.02; // of the map, with an arrow key
const LARGE_STEP = 0.1; // with Shift
const KEYS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const HINTS = {
  expert: "The two directions in which the codes of this expert vary most. Point or drag to walk, "
    + "or use the arrow keys; the sliders follow.",
  all: "Codes of images: similar codes are near each other. Point or drag to walk, or use the arrow "
    + "keys; between images, their codes are mixed.",
};

const percent = (share) => `${Math.round(100 * share)} %`;

export class CodeMap {
  #maps = new LatestRequest();
  #codes = new RequestStream();
  #shown = null; // the key of the map that is shown
  #at = [0.5, 0.5];
  #isVisible = false;

  /** `page` has the model and the state; `onWalk(code)` is called with the code at the mark. */
  constructor(page, onWalk) {
    this.page = page;
    this.onWalk = onWalk;
    const map = byId("map");
    const walk = (event) => {
      const box = byId("map-images").getBoundingClientRect();
      this.#walk((event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height);
    };
    map.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || !this.#shown) return;
      map.setPointerCapture(event.pointerId);
      walk(event);
    });
    map.addEventListener("pointermove", (event) => {
      if (map.hasPointerCapture(event.pointerId)) walk(event);
    });
    map.addEventListener("keydown", (event) => {
      if (!(event.key in KEYS) || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      const step = event.shiftKey ? LARGE_STEP : STEP;
      const [x, y] = this.#at.map((value, axis) => value + step * KEYS[event.key][axis]);
      if (this.#shown) this.#walk(x, y);
    });
    byId("map-of").addEventListener("change", () => this.update());
    new IntersectionObserver(([entry]) => {
      this.#isVisible = entry.isIntersecting;
      this.update();
    }).observe(byId("map-panel"));
  }

  /** The expert of the map, or null for all of them. */
  get #expert() {
    return byId("map-of").value === "all" ? null : this.page.state.chosen;
  }

  /** Show the map of the selected expert or of all experts, if it is in view. */
  update() {
    const { model } = this.page;
    const key = `${model?.name}/${this.#expert}`;
    if (!model || !this.#isVisible || key === this.#shown) return;
    this.#shown = null;
    this.#codes.cancel();
    byId("map").setAttribute("aria-busy", "true");
    byId("map-mark").hidden = true;
    byId("map-hint").textContent = HINTS[byId("map-of").value];
    byId("map-place").textContent = "The map is being drawn.";
    this.#maps.run((signal) => api.map(model.name, this.#expert, signal), (map) => {
      this.#shown = key;
      this.#at = [0.5, 0.5];
      byId("map").setAttribute("aria-busy", "false");
      byId("map-place").textContent = map.explained
        ? `Across: ${percent(map.explained[0])} of the variance of the codes, down: `
          + `${percent(map.explained[1])}.`
        : "Point at the map to walk in it.";
      this.#draw(map, model);
    }, (error) => {
      byId("map-place").replaceChildren();
      showError(error);
    });
  }

  #draw({ columns, filled, images }, { image_shape: shape, background }) {
    const [channels, height, width] = shape;
    const canvas = byId("map-images");
    Object.assign(canvas, { width: columns * width, height: columns * height });
    const context = canvas.getContext("2d");
    const level = Math.round(255 * (background ?? 0));
    context.fillStyle = `rgb(${level} ${level} ${level})`; // of a place without an image
    context.fillRect(0, 0, canvas.width, canvas.height);
    canvas.classList.add("drawn");
    const thumbnail = document.createElement("canvas");
    filled.forEach((isFilled, i) => {
      if (!isFilled) return;
      const start = i * height * width * channels;
      drawPixels(thumbnail, images.subarray(start, start + height * width * channels), shape);
      context.drawImage(thumbnail, (i % columns) * width, Math.floor(i / columns) * height);
    });
  }

  #walk(x, y) {
    this.#at = [x, y].map((value) => Math.min(Math.max(value, 0), 1));
    const mark = byId("map-mark");
    mark.hidden = false;
    [mark.style.left, mark.style.top] = this.#at.map((value) => `${100 * value}%`);
    const expert = this.#expert;
    this.#codes.run(
      (signal) => api.mapCode(this.page.model.name, expert, ...this.#at, signal),
      (code) => {
        clearError();
        byId("map-place").textContent = `${percent(this.#at[0])} across, ${percent(this.#at[1])} down`;
        this.onWalk(code);
      },
      showError,
    );
  }
}
