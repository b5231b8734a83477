// A tour of one minute: a few cards, each about a part of the page, which is framed.

import { byId } from "./dom.js";

const STEPS = [
  {
    at: "shelf-panel",
    title: "Experts",
    text: "The model learned to describe images by a few experts, without labels. Each expert "
      + "stands for one kind of image. Select one to see what it generates on its own.",
  },
  {
    at: "sliders-panel",
    title: "Parameters",
    text: "An expert is a short list of numbers. Move a slider: the image changes. The strongest "
      + "sliders come first, and words at their ends say what they change, where it can be "
      + "measured.",
  },
  {
    at: "magnitude",
    title: "How sure an expert is",
    text: "The longer the list of numbers is as a vector, the more probably the expert fires. The "
      + "magnitude scales it; at 0 the expert is off.",
  },
  {
    at: "draw",
    title: "Random images",
    text: "New draw takes random numbers from those that the expert had for the training images. "
      + "The domain joint draws all experts together.",
  },
  {
    at: "encode-panel",
    view: "encode",
    title: "The other direction",
    text: "Draw something. Each part of the image votes for every expert, and votes that agree add "
      + "up. The bars show how probably each expert fires, and orange shows where the strongest of "
      + "them looks. Load into the sliders copies the numbers for you to change.",
  },
  {
    at: "map-panel",
    view: "map",
    title: "A map to walk in",
    text: "Every point of this map is an image that the model can generate, by the selected expert "
      + "or by all experts. Drag over it, and watch the sliders follow.",
  },
  {
    at: "tabs",
    title: "And more",
    text: "Traversal shows the effect of every slider at once, Interpolate leads from one image to "
      + "another, and Train shows a model while it learns. Undo takes every change back.",
  },
];

export class Tour {
  #at = -1;

  /** `openTab(view)` opens a tab. `hasServer` says whether models can be trained. */
  constructor(openTab, hasServer) {
    this.openTab = openTab;
    this.steps = STEPS.map((step) => ({
      ...step, text: hasServer ? step.text : step.text.replace(/, and Train[^.]*\./, "."),
    }));
    byId("tour-start").addEventListener("click", () => this.#show(0));
    byId("tour-next").addEventListener("click", () => this.#show(this.#at + 1));
    byId("tour-back").addEventListener("click", () => this.#show(this.#at - 1));
    byId("tour-end").addEventListener("click", () => this.#end());
    addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.#at >= 0) this.#end();
    });
  }

  #show(at) {
    this.#unmark();
    if (at >= this.steps.length) {
      this.#end();
      return;
    }
    this.#at = at;
    const { at: id, view, title, text } = this.steps[at];
    if (view) this.openTab(view);
    byId("tour").hidden = false;
    byId("tour-title").textContent = title;
    byId("tour-text").textContent = text;
    byId("tour-count").textContent = `${at + 1} of ${this.steps.length}`;
    byId("tour-back").disabled = at === 0;
    byId("tour-next").textContent = at === this.steps.length - 1 ? "Done" : "Next";
    const part = byId(id).closest(".slider") ?? byId(id);
    part.classList.add("toured");
    part.scrollIntoView({ block: part.offsetHeight > innerHeight / 2 ? "start" : "center" });
    byId("tour-next").focus({ preventScroll: true });
  }

  #unmark() {
    for (const part of document.querySelectorAll(".toured")) part.classList.remove("toured");
  }

  #end() {
    this.#unmark();
    this.#at = -1;
    byId("tour").hidden = true;
    byId("tour-start").focus();
  }
}
