// The page: what is selected, and the updates that follow a change.

import * as api from "./api.js";
import { drawPixels } from "./canvas.js";
import { Chains } from "./chains.js";
import { byId, clearError, copyText, create, debounce, download, showError } from "./dom.js";
import { Encoder } from "./encoder.js";
import { Sliders } from "./sliders.js";
import {
  applyCode, defaultSetting, fromFragment, initialState, toCode, toFragment,
} from "./state.js";
import { Traversal } from "./traversal.js";

const HINTS = {
  learned: "The distribution of the expert's training codes: typical draws.",
  restricted: "A Gaussian, restricted to the half that training codes occupy.",
  complete: "A Gaussian on both sides: half of the draws are negatives.",
  joint: "All experts together, with the distribution of the training codes.",
};
const DOWNLOAD_SCALE = 10; // each pixel of a downloaded image is a square of 10×10

const page = { model: null, state: initialState("") };
const images = new api.RequestStream();
const draws = new api.LatestRequest();
const traversals = new api.LatestRequest();
const pythonLines = new api.LatestRequest();

const selectedSetting = () => page.state.experts.get(page.state.chosen) ?? defaultSetting();

// Updates after a change ------------------------------------------------------------------------

const updateLink = debounce(150, () => history.replaceState(null, "", toFragment(page.state)));
const updatePython = debounce(200, () => pythonLines.run(
  (signal) => api.python(page.model.name, toCode(page.state), signal),
  (text) => byId("python").replaceChildren(text),
  showError,
));
const updateTraversal = debounce(350, () => {
  if (isTraversalVisible) drawTraversal();
});
let isTraversalVisible = false;
let isTraversalDrawn = false;

function drawTraversal() {
  const { model, state } = page;
  traversals.run(
    (signal) => api.traversal(model.name, state.chosen, toCode(state), signal),
    (pixels) => {
      isTraversalDrawn = true;
      traversal.show(pixels, model.image_shape);
    },
    showError,
  );
}

/** Update the page after the code or the selected expert has changed. */
function update() {
  const { model, state } = page;
  const { chosen } = state;
  const setting = selectedSetting();
  sliders.show(setting, model.mean[chosen], model.deviation[chosen], state.experts.has(chosen));
  traversal.mark(setting.offsets);
  isTraversalDrawn = false;
  traversals.cancel();
  showTitles();
  markExperts();
  encoder.showChosen();
  images.run(
    (signal) => api.decode(model.name, toCode(state), signal),
    (pixels, number) => {
      for (const id of ["image", "small-image"]) drawPixels(byId(id), pixels, model.image_shape);
      byId("image").dataset.number = number;
    },
    showError,
  );
  updateLink();
  updatePython();
  updateTraversal();
}

function showTitles() {
  const { chosen, experts, domain, seed } = page.state;
  byId("sliders-title").textContent = `Expert ${chosen}`;
  const numbers = [...experts.keys()].sort((a, b) => a - b);
  const names = numbers.length === page.model.experts ? "All experts"
    : `Experts ${numbers.join(", ")}`;
  byId("mix").hidden = numbers.length < 2;
  byId("mix-text").textContent = `${names} are mixed.`;
  byId("only").textContent = `Keep only expert ${chosen}`;
  const label = numbers.length === 1 ? `Image of expert ${numbers[0]}`
    : `Image of ${names.toLowerCase()}`;
  byId("image").setAttribute("aria-label", numbers.length ? label : "Image with all experts off");
  byId("domain").value = domain;
  byId("domain-hint").textContent = HINTS[domain];
  if (document.activeElement !== byId("seed")) byId("seed").value = seed;
}

// The experts -----------------------------------------------------------------------------------

function buildExperts() {
  const { model } = page;
  byId("shelf").replaceChildren(...Array.from({ length: model.experts }, (_, expert) => {
    const src = api.typicalImageUrl(model.name, expert);
    const image = create("img", { src, alt: "", width: 56, height: 56 });
    const properties = { type: "button", aria: { label: `Expert ${expert}` } };
    const button = create("button", properties, image, create("span", {}, `${expert}`));
    button.addEventListener("click", (event) =>
      clickExpert(expert, byId("several").checked || event.shiftKey));
    return button;
  }));
}

function markExperts() {
  [...byId("shelf").children].forEach((button, expert) => {
    button.setAttribute("aria-pressed", page.state.experts.has(expert));
    if (expert === page.state.chosen) button.setAttribute("aria-current", "true");
    else button.removeAttribute("aria-current");
  });
}

/** Show an expert alone; when mixing, add it, or remove it if it is the selected one. */
function clickExpert(expert, isMixing) {
  const { state } = page;
  if (isMixing && state.experts.has(expert) && state.chosen === expert) {
    state.experts.delete(expert);
  } else {
    const setting = state.experts.get(expert) ?? defaultSetting();
    if (!isMixing) state.experts.clear();
    state.experts.set(expert, setting);
  }
  if (isMixing) byId("several").checked = true;
  selectExpert(expert);
}

function selectExpert(expert) {
  page.state.chosen = expert;
  update();
}

// The panels ------------------------------------------------------------------------------------

/** Change the setting of the selected expert. */
function changeSetting(change) {
  const setting = selectedSetting();
  change(setting);
  page.state.experts.set(page.state.chosen, setting);
  update();
}

const sliders = new Sliders(changeSetting);

const traversal = new Traversal((parameter, offset) => changeSetting((setting) => {
  while (setting.offsets.length <= parameter) setting.offsets.push(0);
  setting.offsets[parameter] = offset;
}));

const chains = new Chains();

const encoder = new Encoder(page, () => {
  updateLink();
  chains.setImage(page.state.pixels);
}, selectExpert);

new IntersectionObserver(([entry]) => {
  isTraversalVisible = entry.isIntersecting;
  if (isTraversalVisible && page.model && !isTraversalDrawn) updateTraversal();
}).observe(byId("sheet-panel"));

// A small copy of the image stays visible when the large one is scrolled out of view, except in the
// middle of the chains, which have images of their own.
const inView = new Set();
function watch(element, options) {
  new IntersectionObserver(([entry]) => {
    if (entry.isIntersecting) inView.add(element);
    else inView.delete(element);
    byId("small-image").hidden = inView.size > 0;
  }, options).observe(element);
}
watch(byId("image"), { threshold: 0.3 });
watch(byId("chains-panel"), { rootMargin: "-45% 0px" });

function draw() {
  const { model, state } = page;
  const send = (signal) => api.draw(model.name, state.domain, state.chosen, state.seed, signal);
  draws.run(send, (code) => {
    applyCode(state, code, byId("several").checked && state.domain !== "joint");
    if (state.experts.size > 1) byId("several").checked = true;
    update();
  }, showError);
}

byId("new-draw").addEventListener("click", () => {
  page.state.seed = Math.floor(Math.random() * 1_000_000);
  byId("seed").value = page.state.seed;
  draw();
});
byId("draw").addEventListener("submit", (event) => event.preventDefault());
byId("seed").addEventListener("change", () => {
  if (!byId("seed").reportValidity() || byId("seed").value === "") return;
  page.state.seed = byId("seed").valueAsNumber;
  draw();
});
byId("domain").addEventListener("change", () => {
  page.state.domain = byId("domain").value;
  showTitles();
  draw();
});
byId("several").addEventListener("change", () => {
  if (!byId("several").checked) keepOnlySelected();
});
byId("only").addEventListener("click", () => {
  byId("several").checked = false;
  keepOnlySelected();
});

function keepOnlySelected() {
  const { state } = page;
  const setting = selectedSetting();
  state.experts.clear();
  state.experts.set(state.chosen, setting);
  update();
}

byId("load").addEventListener("click", () => {
  const { picture: code, firing } = encoder.encoding;
  applyCode(page.state, code);
  byId("several").checked = page.state.experts.size > 1;
  selectExpert(firing.indexOf(Math.max(...firing)));
  byId("stage").scrollIntoView({ block: "nearest" });
  byId("image").closest("section").focus({ preventScroll: true });
});

/** Call an asynchronous action when a button is clicked, and show its error. */
function onClick(id, action) {
  byId(id).addEventListener("click", () => action(page).catch(showError));
}

onClick("download", async ({ model, state }) => {
  download(await api.decodePng(model.name, toCode(state), DOWNLOAD_SCALE), `${model.name}.png`);
});
onClick("sheet-download", async ({ model, state }) => {
  const png = await api.traversalPng(model.name, state.chosen, toCode(state));
  download(png, `${model.name}-expert-${state.chosen}.png`);
});
onClick("copy-python", async ({ model, state }) => {
  const text = await api.python(model.name, toCode(state));
  byId("python").replaceChildren(text);
  await copyText(text, "Three lines of Python", byId("python"));
});
byId("copy-link").addEventListener("click", () => {
  updateLink.now();
  copyText(location.href, "Link");
});

// Opening a model -------------------------------------------------------------------------------

/** Open a model, with the state of a link if there is one. */
async function open(name, linked) {
  images.cancel();
  for (const each of [draws, traversals, pythonLines]) each.cancel();
  if (page.model?.name !== name) {
    page.model = await api.model(name);
    buildExperts();
    sliders.build(page.model.parameters);
    traversal.build(page.model.parameters);
    chains.build(page.model);
  }
  byId("model").value = name;
  page.state = linked ?? initialState(name);
  const restored = { test: page.state.test, pixels: page.state.pixels };
  page.state.model = name;
  page.state.chosen = Math.min(page.state.chosen, page.model.experts - 1);
  for (const [expert, setting] of page.state.experts) {
    if (expert >= page.model.experts) page.state.experts.delete(expert);
    setting.offsets.splice(page.model.parameters);
  }
  if (!linked) page.state.experts.set(0, defaultSetting());
  byId("several").checked = page.state.experts.size > 1;
  encoder.build(page.model);
  update();
  encoder.restore(restored);
}

async function start() {
  const names = await api.models();
  const linked = fromFragment(location.hash);
  byId("model").replaceChildren(...names.map((name) => create("option", { value: name }, name)));
  byId("model").closest("label").classList.toggle("single", names.length === 1);
  byId("model-name").textContent = names[0]; // instead of the menu if there is only one model
  byId("model-name").closest("p").hidden = names.length !== 1;
  const isOpen = linked && names.includes(linked.model);
  await open(isOpen ? linked.model : names[0], isOpen ? linked : null);
  if (linked && !isOpen) {
    showError(new Error(`The link refers to the model ${linked.model}, which is not open here.`));
  }
}

byId("model").addEventListener("change", () =>
  open(byId("model").value, null).then(clearError, showError));
addEventListener("hashchange", () => start().catch(showError));
addEventListener("keydown", (event) => {
  if (event.key === "Escape") clearError();
});
start().catch(showError);
