// The sliders of the selected expert.

import { byId, create } from "./dom.js";
import { round } from "./state.js";

const RANGE = 4; // standard deviations on both sides, unless the code is farther out
const MAX_MAGNITUDE = 3; // unless that of the code is larger
const KEY_STEPS = {
  ArrowLeft: -0.1, ArrowDown: -0.1, ArrowRight: 0.1, ArrowUp: 0.1, PageDown: -1, PageUp: 1,
};

// What a measure is called at its lower and its upper end.
const ENDS = {
  thickness: ["thin", "thick"],
  width: ["narrow", "wide"],
  height: ["short", "tall"],
  size: ["small", "large"],
  slant: ["leans left", "leans right"],
  brightness: ["faint", "bright"],
  horizontal: ["left", "right"],
  vertical: ["up", "down"],
};

const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(2)}`;

export class Sliders {
  /** `change(update)` is called with a function that changes the setting of the expert. */
  constructor(change) {
    this.change = change;
    this.rows = [];
    this.effects = null; // of the selected expert, once they are measured
    byId("sort").addEventListener("change", () => this.#arrange());
    // A slider that moves away while it is used would be a nuisance.
    byId("sliders").addEventListener("focusout", ({ relatedTarget }) => {
      if (!byId("sliders").contains(relatedTarget)) this.#arrange();
    });
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

  /** Create a slider for each parameter. */
  build(parameters) {
    this.rows = Array.from({ length: parameters }, (_, d) => {
      const input = create("input", { type: "range", step: "0.01", id: `parameter-${d}` });
      const spoken = create("span", { className: "spoken" }, "Parameter ");
      const label = create("label", { htmlFor: input.id }, spoken, `${d}`);
      const value = create("span", { className: "value", aria: { hidden: true } });
      const ends = create("span", { className: "ends", id: `ends-${d}`, hidden: true });
      create("div", { className: "slider" }, label, input, value, ends);
      return this.#row(input, (setting, offset) => {
        while (setting.offsets.length <= d) setting.offsets.push(0);
        setting.offsets[d] = offset;
      }, signed);
    });
    this.effects = null;
    byId("sliders").replaceChildren(...this.rows.map((row) => row.input.parentElement));
  }

  /** Set the measured effects of the parameters, or null until they are known. */
  setEffects(effects) {
    this.effects = effects;
    this.rows.forEach(({ input }, d) => {
      const ends = byId(`ends-${d}`);
      const words = ENDS[effects?.[d].measure];
      ends.hidden = !words;
      if (!words) {
        input.removeAttribute("aria-describedby");
        return;
      }
      const [low, high] = effects[d].rises ? words : words.toReversed();
      const spoken = create("span", { className: "spoken" }, " to ");
      ends.replaceChildren(create("span", {}, low), spoken, create("span", {}, high));
      input.setAttribute("aria-describedby", ends.id);
    });
    if (!byId("sliders").contains(document.activeElement)) this.#arrange();
  }

  /** Put the sliders in the order of their effects, or of their numbers. */
  #arrange() {
    const order = [...this.rows.keys()];
    if (byId("sort").checked && this.effects) {
      order.sort((a, b) => this.effects[b].size - this.effects[a].size);
    }
    const wanted = order.map((d) => this.rows[d].input.parentElement);
    const isSame = wanted.every((row, i) => row === byId("sliders").children[i]);
    if (!isSame) byId("sliders").replaceChildren(...wanted);
  }

  show(setting, mean, deviation, isOn) {
    const offset = (d) => setting.offsets[d] ?? 0;
    const range = Math.max(RANGE, ...setting.offsets.map((value) => Math.ceil(Math.abs(value))));
    this.rows.forEach((row, d) => row.show(offset(d), -range, range));
    const greatest = Math.max(MAX_MAGNITUDE, Math.ceil(setting.magnitude));
    this.magnitude.show(setting.magnitude, 0, greatest);
    byId("flip").setAttribute("aria-pressed", setting.negative);
    byId("sliders").classList.toggle("negative", setting.negative); // where the words do not hold
    const vector = mean.map((m, d) => m + deviation[d] * offset(d));
    const norm = Math.hypot(...vector) * setting.magnitude;
    const firing = norm ** 2 / (1 + norm ** 2);
    byId("fires").textContent = isOn ? `firing ${firing.toFixed(2)}` : "off";
    byId("fires").title = "Firing probability of this expert";
  }

  #row(input, set, format) {
    const output = input.parentElement.querySelector(".value");
    const show = (value, least, greatest) => {
      if (Number(input.min) !== least || Number(input.max) !== greatest) {
        Object.assign(input, { min: least, max: greatest });
      }
      input.value = value;
      input.setAttribute("aria-valuetext", format(value));
      input.style.setProperty("--zero", `${100 * (0 - least) / (greatest - least)}%`);
      input.style.setProperty("--at", `${100 * (value - least) / (greatest - least)}%`);
      output.textContent = format(value);
    };
    const move = (value) => this.change((setting) => set(setting, round(value)));
    input.addEventListener("input", () => move(input.valueAsNumber));
    input.addEventListener("keydown", (event) => {
      const step = KEY_STEPS[event.key];
      if (step === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      const value = input.valueAsNumber + step;
      move(Math.min(Math.max(value, Number(input.min)), Number(input.max)));
    });
    return { input, show };
  }
}
