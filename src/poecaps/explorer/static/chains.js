// The panel of Markov chains that walk on the density of a model.
//
// The state of the chains is held here: each response has it, and the next request sends it back.

import * as api from "./api.js";
import { clear, drawPixels } from "./canvas.js";
import { byId, clearError, create, createSvg, showError } from "./dom.js";
import { LatestRequest } from "./requests.js";
import { toBase64 } from "./state.js";

const COUNT = 8; // chains, unless the server accepts only fewer
const COLUMNS = 12; // pictures of the past
const FIRST_INTERVAL = { noise: 25, image: 5 }; // steps between them, doubled whenever all are full
const POINTS_PER_COLUMN = 25; // of the plot
const RECENT = 50; // steps over which the acceptance is averaged
const FRAME = 100; // milliseconds from picture to picture, at least
const CALM_FRAME = 1000; // with reduced motion
const PLOT = { width: 1200, height: 200, margin: 8 }; // units of the viewBox; it is stretched

const REDUCED_MOTION = matchMedia("(prefers-reduced-motion: reduce)");

const temperatureAt = (position) => Math.round(100 * 10 ** position) / 100;
const format = (value, digits) => value.toFixed(digits).replace("-", "−");

/** The past of all chains: free energies, and a few pictures at equal intervals. */
class History {
  constructor(interval) {
    this.interval = interval; // steps between pictures
    this.stride = 1; // steps between points
    this.points = []; // { step, energies }
    this.pictures = []; // the pixels of each chain, at step 0, interval, 2 · interval, …
  }

  get span() {
    return COLUMNS * this.interval;
  }

  /** Return how many of a number of steps can be made before the next picture is due. */
  until(step, steps) {
    return Math.min(steps, this.interval - step % this.interval);
  }

  /** Add the free energies of some steps, of which `step` is the last, and its pictures. */
  add(step, energies, pictures) {
    while (step >= this.span) this.#thin();
    energies.forEach((each, i) => {
      const at = step - energies.length + 1 + i;
      if (at % this.stride === 0) this.points.push({ step: at, energies: each });
    });
    if (step % this.interval === 0) this.pictures[step / this.interval] = pictures;
  }

  #thin() {
    this.interval *= 2;
    if (this.interval / this.stride > POINTS_PER_COLUMN) this.stride *= 2;
    this.pictures = this.pictures.filter((_, i) => i % 2 === 0);
    this.points = this.points.filter(({ step }) => step % this.stride === 0);
  }
}

export class Chains {
  #latest = new LatestRequest();
  #model = null;
  #image = null; // its H·W·C bytes, where chains can start
  #chain = null; // the state, as the server sent it
  #history = new History(FIRST_INTERVAL.noise);
  #accepted = []; // of the recent steps
  #energies = []; // of the last step
  #inverseTemperature = 0;
  #followed = 0;
  #isPlaying = false;
  #isBusy = false;
  #hasFailed = false;
  #isVisible = false;
  #timer = 0;
  #nextFrame = 0;

  constructor() {
    byId("chains-play").addEventListener("click", () => this.#play(!this.#isPlaying));
    byId("chains-step").addEventListener("click", () => {
      this.#play(false);
      this.#advance();
    });
    byId("chains-restart").addEventListener("click", () => this.#restart());
    byId("chains-random").addEventListener("click", () => {
      byId("chains-seed").value = Math.floor(Math.random() * 1_000_000);
      this.#restart();
    });
    byId("chains-form").addEventListener("submit", (event) => event.preventDefault());
    for (const id of ["chains-start", "chains-seed"]) {
      byId(id).addEventListener("change", () => this.#restart());
    }
    byId("temperature").addEventListener("input", () => this.#showTemperature());
    new IntersectionObserver(([entry]) => {
      this.#isVisible = entry.isIntersecting;
      if (this.#isVisible && this.#model && !this.#chain && !this.#isBusy) this.#restart();
      this.#schedule();
    }).observe(byId("chains-panel"));
    document.addEventListener("visibilitychange", () => this.#schedule());
    this.#showTemperature();
  }

  /** Start with another model; nothing happens if it has no density. */
  build(model) {
    this.#stop();
    this.setImage(null); // that of another model
    this.#model = model.chains > 0 ? model : null;
    if (!this.#model) return;
    this.#followed = 0;
    const count = Math.min(COUNT, model.chains);
    byId("chains-grid").replaceChildren(...Array.from({ length: count }, (_, i) => {
      const button = create("button", { type: "button" }, create("canvas"));
      button.addEventListener("click", () => this.#follow(i));
      return button;
    }));
    byId("chains-strip").replaceChildren(...Array.from({ length: COLUMNS }, () =>
      create("canvas", { aria: { role: "img", label: "Not reached yet" } })));
    byId("temperature").value = 0;
    this.#showTemperature();
    if (this.#isVisible) this.#restart();
  }

  /** Set the image at which chains can start, H·W·C bytes or null. Chains from there start anew. */
  setImage(image) {
    if (image === this.#image) return;
    this.#image = image;
    const start = byId("chains-start");
    const option = start.querySelector("[value=image]");
    option.disabled = !image;
    option.textContent = image ? "the encoded image" : "the encoded image (none yet)";
    if (start.value !== "image") return;
    if (!image) start.value = "noise"; // the chains that run go on
    else if (this.#model) this.#restart();
  }

  #stop() {
    this.#play(false);
    this.#latest.cancel();
    this.#isBusy = false;
    this.#chain = null;
  }

  #restart() {
    if (!byId("chains-seed").reportValidity()) return;
    const start = byId("chains-start").value;
    const body = {
      chains: byId("chains-grid").children.length,
      seed: byId("chains-seed").valueAsNumber,
      ...(start === "image" ? { image: toBase64(this.#image) } : {}),
    };
    this.#send((signal) => api.startChains(this.#model.name, body, signal), (walk) => {
      this.#history = new History(FIRST_INTERVAL[start]);
      this.#accepted = [];
      this.#inverseTemperature = walk.chain.anneal ? 0 : 1 / this.#temperature;
      this.#show(walk);
    });
  }

  #advance() {
    if (!this.#chain || this.#isBusy) return;
    const steps = this.#history.until(this.#chain.step, Number(byId("chains-steps").value));
    const body = { chain: this.#chain, steps, temperature: this.#temperature };
    this.#nextFrame = performance.now() + (REDUCED_MOTION.matches ? CALM_FRAME : FRAME);
    this.#send((signal) => api.stepChains(this.#model.name, body, signal), (walk) => {
      this.#accepted.push(...walk.accepted);
      this.#accepted.splice(0, this.#accepted.length - RECENT);
      this.#inverseTemperature = walk.inverse_temperature.at(-1);
      this.#show(walk);
    });
  }

  /** Send a request in place of the one in progress; one that fails pauses the chains. */
  #send(send, onResult) {
    clearTimeout(this.#timer);
    this.#isBusy = true;
    this.#latest.run(send, (walk) => {
      this.#isBusy = false;
      this.#chain = walk.chain;
      if (this.#hasFailed) clearError();
      this.#hasFailed = false;
      onResult(walk);
      this.#schedule();
    }, (error) => {
      this.#isBusy = false;
      this.#hasFailed = true;
      this.#play(false);
      showError(error);
    });
  }

  #play(isPlaying) {
    this.#isPlaying = isPlaying;
    byId("chains-play").textContent = isPlaying ? "Pause" : "Play";
    this.#schedule();
  }

  /** Make the next steps in time for the next picture, unless nobody can see them. */
  #schedule() {
    clearTimeout(this.#timer);
    if (!this.#isPlaying || this.#isBusy || !this.#isVisible || document.hidden) return;
    const wait = Math.max(0, this.#nextFrame - performance.now());
    this.#timer = setTimeout(() => this.#advance(), wait);
  }

  #follow(chain) {
    this.#followed = chain;
    this.#showGrid();
    this.#showHistory();
  }

  // What is shown -------------------------------------------------------------------------------

  get #temperature() {
    return temperatureAt(byId("temperature").valueAsNumber);
  }

  #showTemperature() {
    const slider = byId("temperature");
    const text = this.#temperature.toFixed(2);
    slider.setAttribute("aria-valuetext", text);
    slider.style.setProperty("--at", `${100 * slider.valueAsNumber / Number(slider.max)}%`);
    slider.parentElement.querySelector(".value").textContent = text;
  }

  #show({ chain, images, free_energy: energies }) {
    const pictures = images.map((image) => Uint8Array.from(image.flat(2)));
    this.#history.add(chain.step, energies, pictures);
    this.#energies = energies.at(-1);
    pictures.forEach((pixels, i) => {
      const canvas = byId("chains-grid").children[i].firstChild;
      drawPixels(canvas, pixels, this.#model.image_shape);
      canvas.dataset.step = chain.step;
    });
    this.#showGrid();
    this.#showNumbers();
    this.#showHistory();
  }

  #showGrid() {
    [...byId("chains-grid").children].forEach((button, i) => {
      button.setAttribute("aria-pressed", i === this.#followed);
      const energy = this.#energies[i];
      const label = energy === undefined ? `Chain ${i}`
        : `Chain ${i}, free energy ${format(energy, 1)}`;
      Object.assign(button, { ariaLabel: label, title: label });
    });
  }

  #showNumbers() {
    const { step, anneal } = this.#chain;
    byId("chains-count").textContent = `step ${step}`;
    const t = format(this.#inverseTemperature, 2);
    byId("chains-t").textContent = step < anneal ? `annealing, t = ${t}` : `t = ${t}`;
    const all = this.#accepted.flat();
    const share = all.filter(Boolean).length / all.length;
    byId("chains-acceptance").textContent = `acceptance ${all.length ? format(share, 2) : "–"}`;
  }

  #showHistory() {
    if (!this.#chain) return;
    const { pictures, interval } = this.#history;
    [...byId("chains-strip").children].forEach((canvas, i) => {
      const own = pictures[i]?.[this.#followed];
      if (own) drawPixels(canvas, own, this.#model.image_shape);
      else clear(canvas);
      canvas.ariaLabel = own ? `Chain ${this.#followed} after ${i * interval} steps`
        : "Not reached yet";
      canvas.classList.toggle("empty", !own);
    });
    byId("chains-past").textContent =
      `Chain ${this.#followed} every ${interval} steps, from left to right`;
    this.#plot();
  }

  #plot() {
    const { points, span } = this.#history;
    const all = points.flatMap(({ energies }) => energies);
    const [least, greatest] = [Math.min(...all), Math.max(...all)];
    const { width, height, margin } = PLOT;
    const x = (step) => width * step / span;
    const y = (energy) => margin
      + (height - 2 * margin) * (greatest - energy) / Math.max(greatest - least, 1e-9);
    const grid = Array.from({ length: COLUMNS - 1 }, (_, i) => {
      const at = width * (i + 1) / COLUMNS;
      return createSvg("line", { class: "grid", x1: at, x2: at, y1: 0, y2: height });
    });
    const annealed = x(Math.min(this.#chain.anneal, span));
    const shade = createSvg("rect", { class: "annealed", width: annealed, height });
    const lines = this.#energies.map((_, chain) => createSvg("polyline", {
      class: chain === this.#followed ? "followed" : "other",
      points: points.map(({ step, energies }) =>
        `${x(step).toFixed(1)},${y(energies[chain]).toFixed(1)}`).join(" "),
    }));
    lines.push(...lines.splice(this.#followed, 1)); // on top of the others
    byId("chains-plot").replaceChildren(shade, ...grid, ...lines);
    const now = format(this.#energies[this.#followed], 1);
    byId("chains-plot").setAttribute("aria-label",
      `Free energy over ${this.#chain.step} steps, between ${format(least, 1)} and `
      + `${format(greatest, 1)}; that of chain ${this.#followed} is ${now}`);
    byId("chains-greatest").textContent = format(greatest, 0);
    byId("chains-least").textContent = format(least, 0);
    byId("chains-now").textContent = now;
    byId("chains-annealed").hidden = annealed < 0.4 * width; // too narrow for the word
    byId("chains-annealed").style.left = `${50 * annealed / width}%`; // in the middle of its part
    byId("chains-span").textContent = `${span} steps`;
  }
}
