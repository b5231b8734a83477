// The state of the page, and its representation in a link:
//
// #m=mnist&x=3&d=learned&s=7&e=3:1:0.5,-1;8:-0.7:
//
// are the model, the selected expert, the domain, the seed and the experts that are on, each as
// number:magnitude:offsets. A minus sign before the magnitude stands for the flipped sign. An image
// of the data is &t=17, the pixels of a picture that was drawn or opened are &i=pixels, and an open
// tab is &v=map.

const MAX_LINK_BYTES = 4096; // larger pictures are left out of a link
const VIEWS = ["encode", "sheet", "map", "between", "chains", "training"];
const DEFAULT_VIEW = "encode";
const DOMAINS = ["learned", "restricted", "complete", "joint"];

export const fitsInLink = (pixels) => pixels.length <= MAX_LINK_BYTES;

export const round = (value) => Math.round(value * 100) / 100 || 0; // turns −0 into 0

export const initialState = (model) => ({
  model,
  chosen: 0,
  domain: "learned",
  seed: 0,
  experts: new Map(),
  test: null,
  pixels: null,
  source: null, // of the pixels, see encoder.js; not part of a link
  view: DEFAULT_VIEW,
});

/** Copy the state, so that the page can return to it. */
export const copyState = (state) => ({
  ...state,
  experts: new Map([...state.experts].map(([expert, { offsets, ...setting }]) =>
    [expert, { offsets: [...offsets], ...setting }])),
});

export const defaultSetting = () => ({ offsets: [], magnitude: 1, negative: false });

/** Convert the state to a code of the HTTP interface. */
export function toCode(state) {
  return { experts: [...state.experts].map(([expert, setting]) => ({ expert, ...setting })) };
}

/** Set the experts to a code of the HTTP interface. */
export function applyCode(state, code, keepOthers = false) {
  if (!keepOthers) state.experts.clear();
  for (const { expert, ...setting } of code.experts) state.experts.set(expert, setting);
}

function formatOffsets(offsets) {
  const last = offsets.findLastIndex((value) => value !== 0);
  return offsets.slice(0, last + 1).join(",");
}

export function toFragment(state) {
  const experts = [...state.experts].map(([expert, { offsets, magnitude, negative }]) =>
    `${expert}:${negative ? "-" : ""}${magnitude}:${formatOffsets(offsets)}`);
  const parts = [
    `m=${encodeURIComponent(state.model)}`,
    `x=${state.chosen}`,
    `d=${state.domain}`,
    `s=${state.seed}`,
    `e=${experts.join(";")}`,
  ];
  if (state.test !== null) parts.push(`t=${state.test}`);
  else if (state.pixels && fitsInLink(state.pixels)) {
    parts.push(`i=${toUrlBase64(state.pixels)}`);
  }
  if (state.view !== DEFAULT_VIEW) parts.push(`v=${state.view}`);
  return `#${parts.join("&")}`;
}

const parseWhole = (text) => {
  const value = Number(text);
  return /^\d+$/.test(text ?? "") && value <= Number.MAX_SAFE_INTEGER ? value : null;
};
const parseClamped = (text, least, greatest) => {
  const value = Number(text);
  return text !== "" && Number.isFinite(value) ? Math.min(Math.max(value, least), greatest) : null;
};

/** Read the state from a link, or return null if it has none. Invalid parts are ignored. */
export function fromFragment(fragment) {
  const values = new Map(fragment.replace(/^#/, "").split("&").map((part) => {
    const cut = part.indexOf("=");
    return [part.slice(0, cut), part.slice(cut + 1)];
  }));
  if (!values.has("m")) return null;
  const state = initialState(decodeName(values.get("m")));
  state.chosen = parseWhole(values.get("x")) ?? 0;
  state.seed = parseWhole(values.get("s")) ?? 0;
  if (DOMAINS.includes(values.get("d"))) state.domain = values.get("d");
  for (const each of (values.get("e") ?? "").split(";")) {
    const [number, magnitude = "1", list = ""] = each.split(":");
    const expert = parseWhole(number);
    const size = parseClamped(magnitude.replace("-", ""), 0, 10);
    const offsets = list === "" ? []
      : list.split(",").map((value) => parseClamped(value, -10_000, 10_000));
    if (expert === null || size === null || offsets.includes(null)) continue;
    const negative = magnitude.startsWith("-");
    state.experts.set(expert, { offsets, magnitude: size, negative });
  }
  state.test = parseWhole(values.get("t"));
  if (VIEWS.includes(values.get("v"))) state.view = values.get("v");
  if (values.has("i")) state.pixels = fromUrlBase64(values.get("i"));
  return state;
}

function decodeName(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** Convert bytes to base64. */
export const toBase64 = (bytes) =>
  btoa(bytes.reduce((text, byte) => text + String.fromCharCode(byte), ""));

function toUrlBase64(pixels) {
  return toBase64(pixels).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

/** Convert base64 to bytes; the form for links has - and _ for + and /. */
export const fromBase64 = (text) =>
  Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (c) => c.charCodeAt(0));

function fromUrlBase64(text) {
  try {
    return fromBase64(text);
  } catch {
    return null;
  }
}
