// What the page shows, and how a link holds it.
//
// #m=mnist&x=3&d=learned&s=7&e=3:1:0.5,-1;8:-0.7:   model, chosen expert, domain, seed, experts (number:magnitude:offsets)
// A minus before the magnitude is the flipped sign. Test images are &t=17, pictures that were drawn or opened &i=pixels.

const MOST_PIXELS = 4096; // bytes of a picture that a link holds
const DOMAINS = ["learned", "restricted", "complete", "joint"];

export const round = (value) => Math.round(value * 100) / 100 || 0; // no −0

export function fresh(model) {
  return { model, chosen: 0, domain: "learned", seed: 0, experts: new Map(), test: null, pixels: null };
}

export const setting = () => ({ offsets: [], magnitude: 1, negative: false });

/** The code as the HTTP interface takes it. */
export function picture(state) {
  return { experts: [...state.experts].map(([expert, each]) => ({ expert, ...each })) };
}

/** Take over a code from the HTTP interface. */
export function take(state, answer, keepOthers = false) {
  if (!keepOthers) state.experts.clear();
  for (const { expert, ...each } of answer.experts) state.experts.set(expert, each);
}

function trimmed(offsets) {
  const last = offsets.findLastIndex((value) => value !== 0);
  return offsets.slice(0, last + 1).join(",");
}

export function toFragment(state) {
  const experts = [...state.experts]
    .map(([expert, each]) => `${expert}:${each.negative ? "-" : ""}${each.magnitude}:${trimmed(each.offsets)}`);
  const parts = [
    `m=${encodeURIComponent(state.model)}`, `x=${state.chosen}`, `d=${state.domain}`, `s=${state.seed}`,
    `e=${experts.join(";")}`,
  ];
  if (state.test !== null) parts.push(`t=${state.test}`);
  else if (state.pixels && state.pixels.length <= MOST_PIXELS) parts.push(`i=${toBase64(state.pixels)}`);
  return `#${parts.join("&")}`;
}

const whole = (text, most = Number.MAX_SAFE_INTEGER) => {
  const value = Number(text);
  return /^\d+$/.test(text ?? "") && value <= most ? value : null;
};
const within = (text, least, most) => {
  const value = Number(text);
  return text !== "" && Number.isFinite(value) ? Math.min(Math.max(value, least), most) : null;
};

/** Read a link: the parts of a state that it holds, or null where it holds none. What makes no sense is left out. */
export function fromFragment(fragment) {
  const values = new Map(fragment.replace(/^#/, "").split("&").map((part) => {
    const cut = part.indexOf("=");
    return [part.slice(0, cut), part.slice(cut + 1)];
  }));
  if (!values.has("m")) return null;
  const state = fresh(decode(values.get("m")));
  state.chosen = whole(values.get("x")) ?? 0;
  state.seed = whole(values.get("s")) ?? 0;
  if (DOMAINS.includes(values.get("d"))) state.domain = values.get("d");
  for (const each of (values.get("e") ?? "").split(";")) {
    const [expert, magnitude = "1", offsets = ""] = each.split(":");
    const number = whole(expert);
    const size = within(magnitude.replace("-", ""), 0, 10);
    const numbers = offsets === "" ? [] : offsets.split(",").map((value) => within(value, -10_000, 10_000));
    if (number === null || size === null || numbers.includes(null)) continue;
    state.experts.set(number, { offsets: numbers, magnitude: size, negative: magnitude.startsWith("-") });
  }
  state.test = whole(values.get("t"));
  if (values.has("i")) state.pixels = fromBase64(values.get("i"));
  return state;
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

const toBase64 = (pixels) =>
  btoa(String.fromCharCode(...pixels)).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");

function fromBase64(text) {
  try {
    return Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (letter) => letter.charCodeAt(0));
  } catch {
    return null;
  }
}
