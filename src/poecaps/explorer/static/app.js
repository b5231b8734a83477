// The page: what is selected, and the updates that follow a change.

import * as api from "./api.js";
import { Between } from "./between.js";
import { drawPixels } from "./canvas.js";
import { Chains } from "./chains.js";
import { byId, clearError, copyText, create, debounce, download, showError } from "./dom.js";
import { Encoder } from "./encoder.js";
import { CodeMap } from "./map.js";
import { LatestRequest, RequestStream } from "./requests.js";
import { Sliders } from "./sliders.js";
import { applyCode, defaultSetting, fromFragment, initialState, toCode } from "./state.js";
import { Tabs } from "./tabs.js";
import { Timeline } from "./timeline.js";
import { Tour } from "./tour.js";
import { Training } from "./training.js";
import { Traversal } from "./traversal.js";

const HINTS = {
  learned: "The distribution of the expert's training codes: typical draws.",
  restricted: "A Gaussian, restricted to the half that training codes occupy.",
  complete: "A Gaussian on both sides: half of the draws are negatives.",
  joint: "All experts together, with the distribution of the training codes.",
};
const DOWNLOAD_SCALE = 10; // each pixel of a downloaded image is a square of 10×10

const page = { model: null, state: initialState("") };
const images = new RequestStream();
const draws = new LatestRequest();
const traversals = new LatestRequest();
const pythonLines = new LatestRequest();
const effects = new LatestRequest();
const knownEffects = new Map(); // by model and expert

const selectedSetting = () => page.state.experts.get(page.state.chosen) ?? defaultSetting();

// Updates after a change ------------------------------------------------------------------------

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
  showEffects();
  map.update();
  images.run(
    (signal) => api.decode(model.name, toCode(state), signal),
    (pixels, number) => {
      for (const canvas of document.querySelectorAll(".mirror")) {
        drawPixels(canvas, pixels, model.image_shape);
      }
      byId("image").dataset.number = number;
    },
    showError,
  );
  timeline.add();
  updatePython();
  updateTraversal();
}

/** Say what the sliders of the selected expert change, once it is measured. */
function showEffects() {
  const { model, state: { chosen } } = page;
  const key = `${model.name}/${chosen}`;
  if (sliders.effectsOf === key) return;
  sliders.effectsOf = key;
  sliders.setEffects(knownEffects.get(key) ?? null);
  if (knownEffects.has(key)) return;
  effects.run((signal) => api.effects(model.name, chosen, signal), (found) => {
    knownEffects.set(key, found);
    sliders.setEffects(found);
  }, showError);
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
  encoder.follow(expert);
  update();
}

/** Show a code of the HTTP interface, and select its strongest expert. */
function showCode(code, strongest) {
  applyCode(page.state, code);
  byId("several").checked = page.state.experts.size > 1;
  if (strongest !== undefined) page.state.chosen = strongest;
  else if (!page.state.experts.has(page.state.chosen)) {
    [page.state.chosen] = page.state.experts.keys();
  }
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
  timeline.add();
  chains.setImage(page.state.pixels);
}, selectExpert);

const map = new CodeMap(page, (code) => showCode(code));
const between = new Between(page, () => encoder.encoding?.picture ?? null, (code) =>
  showCode(code));
const training = new Training((name) => refreshModels(name).catch(showError));
const tabs = new Tabs((view) => {
  page.state.view = view;
  if (page.model) timeline.replace();
});
const timeline = new Timeline(page, (state) => start(state).catch(showError));
new Tour((view) => tabs.open(view), api.hasServer);
document.body.classList.add(api.hasServer ? "served" : "local");

new IntersectionObserver(([entry]) => {
  isTraversalVisible = entry.isIntersecting;
  if (isTraversalVisible && page.model && !isTraversalDrawn) updateTraversal();
}).observe(byId("sheet-panel"));

// A small copy of the image stays visible when the large one is scrolled out of view, except in the
// middle of panels that have images of their own.
const inView = new Set();
function watch(element, options) {
  new IntersectionObserver(([entry]) => {
    if (entry.isIntersecting) inView.add(element);
    else inView.delete(element);
    byId("small-image").hidden = inView.size > 0;
  }, options).observe(element);
}
watch(byId("image"), { threshold: 0.3 });
for (const id of ["chains-panel", "map-panel", "between-panel", "training-panel"]) {
  watch(byId(id), { rootMargin: "-45% 0px" });
}

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
  showCode(code, firing.indexOf(Math.max(...firing)));
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
  timeline.addNow();
  copyText(location.href, "Link");
});

// Opening a model -------------------------------------------------------------------------------

/** Open a model, with a state if there is one, else with the image that is encoded now. */
async function open(name, state) {
  images.cancel();
  for (const each of [draws, traversals, pythonLines, effects]) each.cancel();
  const isNew = page.model?.name !== name;
  const model = isNew ? await load(name) : page.model;
  const next = state ?? {
    ...initialState(name), view: page.state.view,
    source: isNew && page.model ? encoder.sourceFor(model.image_shape) : null,
  };
  page.model = model;
  page.state = next;
  page.state.model = name;
  byId("model").value = name;
  if (isNew) build();
  page.state.chosen = Math.min(page.state.chosen, page.model.experts - 1);
  for (const [expert, setting] of page.state.experts) {
    if (expert >= page.model.experts) page.state.experts.delete(expert);
    setting.offsets.splice(page.model.parameters);
  }
  if (!state) page.state.experts.set(0, defaultSetting());
  byId("several").checked = page.state.experts.size > 1;
  encoder.follow(page.state.chosen);
  update();
  encoder.restore();
}

/** Load a model, which takes a while without a server; until then the page is dimmed. */
async function load(name) {
  const main = document.querySelector("main");
  main.ariaBusy = "true";
  try {
    return await api.model(name);
  } catch (error) {
    if (page.model) byId("model").value = page.model.name;
    throw error;
  } finally {
    main.ariaBusy = "false";
  }
}

/** Build what depends on the model. */
function build() {
  const { model } = page;
  buildExperts();
  sliders.build(model.parameters);
  sliders.effectsOf = null;
  traversal.build(model.parameters);
  chains.build(model);
  encoder.build(model);
  between.build();
  tabs.setHidden("chains", !model.chains);
  byId("model-note").hidden = !model.note;
  byId("model-note").textContent = `Note: ${model.note}.`;
}

/** Show the names of the models in the menu. */
async function showModels() {
  const names = await api.models();
  byId("model").replaceChildren(...names.map((name) => create("option", { value: name }, name)));
  byId("model").closest("label").classList.toggle("single", names.length === 1);
  byId("model-name").textContent = names[0]; // instead of the menu if there is only one model
  byId("model-name").closest("p").hidden = names.length !== 1;
  return names;
}

/** Open a model that was not there when the page was opened. */
async function refreshModels(name) {
  await showModels();
  knownEffects.clear(); // a model of the same name may have been there before
  page.model = null;
  await open(name, null);
  scrollTo(0, 0);
  byId("stage").focus({ preventScroll: true }); // the button that was pressed is far below
}

/** Open the page at a state, at first that of the link. */
async function start(state = fromFragment(location.hash)) {
  const names = await showModels();
  const isThere = state && names.includes(state.model);
  await open(isThere ? state.model : names[0], isThere ? state : null);
  tabs.open(page.state.view);
  if (state && !isThere) {
    showError(new Error(`The link refers to the model ${state.model}, which is not open here.`));
  }
}

byId("model").addEventListener("change", () =>
  open(byId("model").value, null).then(clearError, showError));
addEventListener("keydown", (event) => {
  if (event.key === "Escape") clearError();
});
start().then(() => {
  timeline.start();
  if (api.hasServer) training.build().catch(showError);
}, showError);
