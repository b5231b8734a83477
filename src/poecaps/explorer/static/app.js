// The page: what is chosen, and what follows from it.

import * as api from "./api.js";
import { afterwards, byId, complain, copy, forgive, make, save } from "./dom.js";
import { Encoder } from "./encoder.js";
import { paint } from "./paint.js";
import { Sheet } from "./sheet.js";
import { Sliders } from "./sliders.js";
import { fresh, fromFragment, picture, setting, take, toFragment } from "./state.js";

const HINTS = {
  learned: "As the expert's training codes are spread: typical draws.",
  restricted: "A Gaussian, turned to the side that training images visit.",
  complete: "A Gaussian on all sides: half of the draws are negatives.",
  joint: "All experts together, as the codes of training images are spread.",
};
const ENLARGED = 10; // pixels of the download for each of the picture

const page = { model: null, state: fresh("") };
const pictures = new api.Stream();
const draws = new api.Latest();
const sheets = new api.Latest();
const lines = new api.Latest();

// What follows when something changes -------------------------------------------------------------------

const remember = afterwards(150, () => history.replaceState(null, "", toFragment(page.state)));
const showPython = afterwards(200, () => lines.run(
  (signal) => api.python(page.model.name, picture(page.state), signal),
  (text) => byId("python").replaceChildren(text),
  complain,
));
const showSheet = afterwards(350, () => {
  if (sheetVisible) drawSheet();
});
let sheetVisible = false;
let sheetDrawn = false;

function drawSheet() {
  const { model, state } = page;
  sheets.run(
    (signal) => api.traversal(model.name, state.chosen, picture(state), signal),
    (pixels) => {
      sheetDrawn = true;
      sheet.show(pixels, model.image_shape);
    },
    complain,
  );
}

/** The picture, or what is chosen, has changed. */
function changed() {
  const { model, state } = page;
  const own = state.experts.get(state.chosen) ?? setting();
  sliders.show(own, model.mean[state.chosen], model.deviation[state.chosen], state.experts.has(state.chosen));
  sheet.mark(own.offsets);
  sheetDrawn = false;
  sheets.cancel();
  showTitles();
  showShelf();
  encoder.showChosen();
  pictures.run(
    (signal) => api.decode(model.name, picture(state), signal),
    (pixels, number) => {
      for (const id of ["image", "small-image"]) paint(byId(id), pixels, model.image_shape);
      byId("image").dataset.number = number;
    },
    complain,
  );
  remember();
  showPython();
  showSheet();
}

function showTitles() {
  const { chosen, experts, domain, seed } = page.state;
  byId("sliders-title").textContent = `Expert ${chosen}`;
  const numbers = [...experts.keys()].sort((a, b) => a - b);
  const of = numbers.length === page.model.experts ? "All experts" : `Experts ${numbers.join(", ")}`;
  byId("mix").hidden = numbers.length < 2;
  byId("mix-text").textContent = `${of} are mixed.`;
  byId("only").textContent = `Keep only ${chosen}`;
  byId("image").setAttribute("aria-label", numbers.length === 0 ? "Image with all experts off"
    : `Image of ${numbers.length === 1 ? `expert ${numbers[0]}` : of.toLowerCase()}`);
  byId("domain").value = domain;
  byId("domain-hint").textContent = HINTS[domain];
  if (document.activeElement !== byId("seed")) byId("seed").value = seed;
}

// The shelf ---------------------------------------------------------------------------------------------

function buildShelf() {
  const { model } = page;
  byId("shelf").replaceChildren(...Array.from({ length: model.experts }, (_, expert) => {
    const image = make("img", { src: api.typicalAddress(model.name, expert), alt: "", width: 56, height: 56 });
    const card = make("button", { type: "button", aria: { label: `Expert ${expert}` } }, image, make("span", {}, `${expert}`));
    card.addEventListener("click", (event) => chooseFromShelf(expert, byId("several").checked || event.shiftKey));
    return card;
  }));
}

function showShelf() {
  [...byId("shelf").children].forEach((card, expert) => {
    card.setAttribute("aria-pressed", page.state.experts.has(expert));
    if (expert === page.state.chosen) card.setAttribute("aria-current", "true");
    else card.removeAttribute("aria-current");
  });
}

/** Show an expert alone; where several are mixed, add it, or take it away if it is the chosen one. */
function chooseFromShelf(expert, several) {
  const { state } = page;
  if (several && state.experts.has(expert) && state.chosen === expert) state.experts.delete(expert);
  else {
    const own = state.experts.get(expert) ?? setting();
    if (!several) state.experts.clear();
    state.experts.set(expert, own);
  }
  if (several) byId("several").checked = true;
  choose(expert);
}

function choose(expert) {
  page.state.chosen = expert;
  changed();
}

// Parts -------------------------------------------------------------------------------------------------

const sliders = new Sliders((update) => {
  const { state } = page;
  const own = state.experts.get(state.chosen) ?? setting();
  update(own);
  state.experts.set(state.chosen, own);
  changed();
});

const sheet = new Sheet((parameter, step) => {
  const { state } = page;
  const own = state.experts.get(state.chosen) ?? setting();
  while (own.offsets.length <= parameter) own.offsets.push(0);
  own.offsets[parameter] = step;
  state.experts.set(state.chosen, own);
  changed();
});

const encoder = new Encoder(page, remember, choose);

new IntersectionObserver(([entry]) => {
  sheetVisible = entry.isIntersecting;
  if (sheetVisible && page.model && !sheetDrawn) showSheet();
}).observe(byId("sheet-panel"));

// A small copy of the image stays in sight while the sliders or the sheet are used and the large one is not.
new IntersectionObserver(([entry]) => {
  byId("small-image").hidden = entry.isIntersecting;
}, { threshold: 0.3 }).observe(byId("image"));

function draw() {
  const { model, state } = page;
  draws.run((signal) => api.draw(model.name, state.domain, state.chosen, state.seed, signal), (answer) => {
    take(state, answer, byId("several").checked && state.domain !== "joint");
    if (state.experts.size > 1) byId("several").checked = true;
    changed();
  }, complain);
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
  if (!byId("several").checked) keepOnlyChosen();
});
byId("only").addEventListener("click", () => {
  byId("several").checked = false;
  keepOnlyChosen();
});

function keepOnlyChosen() {
  const { state } = page;
  const own = state.experts.get(state.chosen) ?? setting();
  state.experts.clear();
  state.experts.set(state.chosen, own);
  changed();
}

byId("load").addEventListener("click", () => {
  take(page.state, encoder.answer.picture);
  byId("several").checked = page.state.experts.size > 1;
  const { firing } = encoder.answer;
  choose(firing.indexOf(Math.max(...firing)));
  byId("stage").scrollIntoView({ block: "nearest" });
  byId("image").closest("section").focus({ preventScroll: true });
});
byId("download").addEventListener("click", async () => {
  try {
    save(await api.png(page.model.name, picture(page.state), ENLARGED), `${page.model.name}.png`);
  } catch (error) {
    complain(error);
  }
});
byId("sheet-download").addEventListener("click", async () => {
  const { model, state } = page;
  try {
    save(await api.sheetPng(model.name, state.chosen, picture(state)), `${model.name}-expert-${state.chosen}.png`);
  } catch (error) {
    complain(error);
  }
});
byId("copy-python").addEventListener("click", async () => {
  try {
    const text = await api.python(page.model.name, picture(page.state));
    byId("python").replaceChildren(text);
    await copy(text, "Three lines of Python", byId("python"));
  } catch (error) {
    complain(error);
  }
});
byId("copy-link").addEventListener("click", () => {
  remember.now();
  copy(location.href, "Link");
});

// Opening -----------------------------------------------------------------------------------------------

/** Open a model, with the state of a link where there is one. */
async function open(name, linked) {
  pictures.cancel();
  for (const each of [draws, sheets, lines]) each.cancel();
  if (page.model?.name !== name) {
    page.model = await api.model(name);
    buildShelf();
    sliders.build(page.model.parameters);
    sheet.build(page.model.parameters);
  }
  byId("model").value = name;
  page.state = linked ?? fresh(name);
  const restored = { test: page.state.test, pixels: page.state.pixels };
  page.state.model = name;
  page.state.chosen = Math.min(page.state.chosen, page.model.experts - 1);
  for (const [expert, each] of page.state.experts) {
    if (expert >= page.model.experts) page.state.experts.delete(expert);
    each.offsets.splice(page.model.parameters);
  }
  if (!linked) page.state.experts.set(0, setting());
  byId("several").checked = page.state.experts.size > 1;
  encoder.build(page.model);
  changed();
  encoder.restore(restored);
}

async function start() {
  const names = await api.models();
  const linked = fromFragment(location.hash);
  byId("model").replaceChildren(...names.map((name) => make("option", { value: name }, name)));
  byId("model").closest("label").classList.toggle("single", names.length === 1);
  byId("model-name").textContent = names[0]; // shown in place of the choice where there is none
  byId("model-name").closest("p").hidden = names.length !== 1;
  const known = linked && names.includes(linked.model);
  await open(known ? linked.model : names[0], known ? linked : null);
  if (linked && !known) complain(new Error(`The link is to a model ${linked.model}, which is not open here.`));
}

byId("model").addEventListener("change", () => open(byId("model").value, null).then(forgive, complain));
addEventListener("hashchange", () => start().catch(complain));
addEventListener("keydown", (event) => {
  if (event.key === "Escape") forgive();
});
start().catch(complain);
