// The sliders of the chosen expert.

import { byId, make } from "./dom.js";
import { round } from "./state.js";

const REACH = 4; // standard deviations, unless the code lies farther out
const LOUD = 3;
const STEPS = { ArrowLeft: -0.1, ArrowDown: -0.1, ArrowRight: 0.1, ArrowUp: 0.1, PageDown: -1, PageUp: 1 };

const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(2)}`;

export class Sliders {
  /** `change(update)` is called with a function that changes the setting of the chosen expert. */
  constructor(change) {
    this.change = change;
    this.rows = [];
    this.magnitude = this.#row(byId("magnitude"), (setting, value) => {
      setting.magnitude = value;
    }, (value) => `×${value.toFixed(2)}`);
    byId("flip").addEventListener("click", () => change((setting) => {
      setting.negative = !setting.negative;
    }));
    byId("reset").addEventListener("click", () => change((setting) => {
      Object.assign(setting, { offsets: [], magnitude: 1, negative: false });
    }));
  }

  /** Make a slider for each of so many parameters. */
  build(parameters) {
    this.rows = Array.from({ length: parameters }, (_, d) => {
      const input = make("input", { type: "range", step: "0.01", id: `parameter-${d}` });
      const label = make("label", { htmlFor: input.id }, make("span", { className: "spoken" }, "Parameter "), `${d}`);
      make("div", { className: "slider" }, label, input, make("span", { className: "value", aria: { hidden: true } }));
      return this.#row(input, (setting, value) => {
        while (setting.offsets.length <= d) setting.offsets.push(0);
        setting.offsets[d] = value;
      }, signed);
    });
    byId("sliders").replaceChildren(...this.rows.map((row) => row.input.parentElement));
  }

  show(setting, mean, deviation, on) {
    const reach = Math.max(REACH, ...setting.offsets.map((value) => Math.ceil(Math.abs(value))));
    this.rows.forEach((row, d) => row.show(setting.offsets[d] ?? 0, -reach, reach));
    this.magnitude.show(setting.magnitude, 0, Math.max(LOUD, Math.ceil(setting.magnitude)));
    byId("flip").setAttribute("aria-pressed", setting.negative);
    const length = Math.hypot(...mean.map((m, d) => m + deviation[d] * (setting.offsets[d] ?? 0))) * setting.magnitude;
    byId("fires").textContent = on ? `fires ${(length ** 2 / (1 + length ** 2)).toFixed(2)}` : "off";
    byId("fires").title = "Firing probability of this expert";
  }

  #row(input, set, text) {
    const shown = input.parentElement.querySelector(".value"); // spoken as the slider's own value
    const show = (value, least, most) => {
      if (Number(input.min) !== least || Number(input.max) !== most) Object.assign(input, { min: least, max: most });
      input.value = value;
      input.setAttribute("aria-valuetext", text(value));
      input.style.setProperty("--zero", `${100 * (0 - least) / (most - least)}%`);
      input.style.setProperty("--at", `${100 * (value - least) / (most - least)}%`);
      shown.textContent = text(value);
    };
    const move = (value) => this.change((setting) => set(setting, round(value)));
    input.addEventListener("input", () => move(input.valueAsNumber));
    input.addEventListener("keydown", (event) => {
      const step = STEPS[event.key];
      if (step === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      move(Math.min(Math.max(input.valueAsNumber + step, Number(input.min)), Number(input.max)));
    });
    return { input, show };
  }
}
