// The panel in which a small model learns while one watches.

import * as api from "./api.js";
import { drawPixels } from "./canvas.js";
import { byId, clearError, create, createSvg, enable, showError } from "./dom.js";
import { LatestRequest } from "./requests.js";
import { fromBase64 } from "./state.js";

const INTERVAL = 500; // milliseconds between two requests while a model learns
const IDLE_INTERVAL = 3000; // otherwise: another page may start a training
const PLOT = { width: 1200, height: 200, margin: 8 }; // units of the viewBox; it is stretched
const STAGES = {
  autoencoder: "Filters learn to see and to draw.",
  encoder: "Experts compete for the images: each shows the mean of those it has won.",
  decoder: "The way back from the experts to the image is learned.",
  "pixel decoder": "Images become sharp.",
};
const TITLES = {
  images: "Images (not learned from)",
  reconstructions: "Their reconstructions",
  experts: "What each expert has won",
  draws: "Random draws of each expert",
};
const STATUSES = {
  starting: "starting", stopped: "stopped", finished: "finished", failed: "failed",
};

const describe = (stage) => STAGES[stage.replace(/ \d+$/, "")] ?? "";

export class Training {
  #latest = new LatestRequest();
  #points = [];
  #run = null; // its number
  #error = null; // the last one that was shown
  #timer = 0;
  #isVisible = false;

  /** `onOpen(name)` is called to explore the trained model. */
  constructor(onOpen) {
    this.onOpen = onOpen;
    byId("training-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#start().catch(showError);
    });
    byId("training-stop").addEventListener("click", () =>
      api.stopTraining().then((state) => this.#show(state), showError));
    new IntersectionObserver(([entry]) => {
      this.#isVisible = entry.isIntersecting;
      if (this.#isVisible) this.#poll();
    }).observe(byId("training-panel"));
    document.addEventListener("visibilitychange", () => this.#isVisible && this.#poll());
  }

  async build() {
    const sources = await api.trainingSources();
    byId("training-data").replaceChildren(...sources.map(({ name, label }) =>
      create("option", { value: name }, label)));
  }

  async #start() {
    const state = await api.startTraining({
      source: byId("training-data").value,
      images: Number(byId("training-images").value),
      experts: Number(byId("training-experts").value),
      seed: byId("training-seed").valueAsNumber,
    });
    clearError();
    this.#show(state);
    byId("training-panel").scrollIntoView({ block: "start" }); // it has become taller
  }

  #poll() {
    clearTimeout(this.#timer);
    if (!this.#isVisible || document.hidden) return;
    this.#latest.run(
      (signal) => api.training(this.#points.length, signal),
      (state) => this.#show(state),
      showError,
    );
  }

  #show(state) {
    if (state.run !== this.#run) {
      this.#run = state.run;
      this.#points = [];
      this.#error = null;
      byId("training-images-shown").replaceChildren();
      if (state.first > 0) { // points of another run were asked for
        this.#poll();
        return;
      }
    }
    this.#points.splice(state.first, Infinity, ...state.points);
    const isRunning = state.status === "starting" || state.status === "running";
    enable(byId("training-start"), !isRunning, byId("training-stop"), isRunning);
    byId("training-live").hidden = state.status === "idle";
    byId("training-open").hidden = !state.model;
    byId("training-open").onclick = () => this.onOpen(state.model);
    this.#showProgress(state);
    this.#plot(state);
    for (const [name, images] of Object.entries(state.pictures ?? {})) this.#pictures(name, images);
    if (state.error && state.error !== this.#error) showError(new Error(state.error));
    this.#error = state.error;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#poll(), isRunning ? INTERVAL : IDLE_INTERVAL);
  }

  #showProgress({ status, stages, stage, done, seconds_left: left }) {
    const time = left === null ? "" : `, about ${Math.ceil(left)} s left`;
    const text = status === "running" && stage
      ? `${stage}, ${Math.round(100 * done)} %${time}` : STATUSES[status] ?? "";
    const pill = byId("training-status");
    if (pill.textContent !== text) pill.textContent = text; // it is read aloud
    byId("training-stages").replaceChildren(...stages.map((name) => {
      const at = stages.indexOf(stage);
      const isPast = stages.indexOf(name) < at || status === "finished";
      const item = create("li", { className: isPast ? "past" : name === stage ? "now" : "" }, name);
      if (name === stage && status === "running") {
        item.setAttribute("aria-current", "step");
        item.append(create("span", { className: "hint" }, describe(name)));
      }
      return item;
    }));
  }

  /** Draw the error of every stage, one beside the other. */
  #plot({ stages }) {
    const { width, height, margin } = PLOT;
    const drawn = this.#points.filter(({ error }) => error !== null);
    const all = drawn.flatMap(({ error, held_out: held }) => [error, held ?? 0]);
    const greatest = Math.min(1, Math.max(1e-9, ...all)); // at 1, nothing is learned yet
    const x = ({ stage, share }) => width * (stages.indexOf(stage) + share) / stages.length;
    const y = (error) => margin
      + (height - 2 * margin) * (1 - Math.min(error / greatest, 1));
    const line = (stage, key) => createSvg("polyline", {
      class: key === "error" ? "followed" : "held-out",
      points: drawn.filter((point) => point.stage === stage && point[key] !== null)
        .map((point) => `${x(point).toFixed(1)},${y(point[key]).toFixed(1)}`).join(" "),
    });
    const grid = stages.slice(1).map((_, i) => {
      const at = width * (i + 1) / stages.length;
      return createSvg("line", { class: "grid", x1: at, x2: at, y1: 0, y2: height });
    });
    byId("training-plot").replaceChildren(...grid, ...stages.flatMap((stage) =>
      [line(stage, "held_out"), line(stage, "error")]));
    const last = drawn.at(-1);
    byId("training-plot").setAttribute("aria-label", last
      ? `Error of ${last.stage}: ${last.error.toFixed(3)}` : "Error: no curve yet");
    byId("training-greatest").textContent = drawn.length ? greatest.toFixed(2) : "";
  }

  #pictures(name, { shape, count, pixels }) {
    const id = `training-shown-${name}`;
    if (!byId(id)) {
      byId("training-images-shown").append(create("figure", {},
        create("figcaption", {}, TITLES[name]), create("div", { id, className: "thumbnails" })));
    }
    const canvases = byId(id).children;
    while (canvases.length < count) {
      const label = `${TITLES[name]}, ${canvases.length + 1}`;
      byId(id).append(create("canvas", { aria: { role: "img", label } }));
    }
    const bytes = fromBase64(pixels);
    const size = shape.reduce((a, b) => a * b);
    for (let i = 0; i < count; i += 1) {
      drawPixels(canvases[i], bytes.subarray(i * size, (i + 1) * size), shape);
    }
  }
}
