// The worker that computes with a model: it receives { id, method, args } and answers
// { id, result } or { id, error }.

import { Codes } from "./codes.js";
import { Network } from "./network.js";
import { readPicture } from "./pictures.js";

const models = new Map(); // promises, by the address of their files
const cancelled = new Set();

/** Convert half precision to single precision. */
function fromHalf(bits) {
  const table = new Float32Array(65536);
  for (let i = 0; i < 65536; i += 1) {
    const [exponent, fraction] = [(i >> 10) & 31, i & 1023];
    const size = exponent === 0 ? fraction * 2 ** -24 : (1 + fraction / 1024) * 2 ** (exponent - 15);
    table[i] = i >> 15 ? -size : size;
  }
  return Float32Array.from(bits, (each) => table[each]);
}

async function get(url) {
  const response = await fetch(url);
  if (!response.ok) throw new Error(`Cannot load ${url}: ${response.statusText}`);
  return response;
}

async function load(url) {
  const [info, data] = await Promise.all([
    get(`${url}.json`).then((response) => response.json()),
    get(`${url}.bin`).then((response) => response.arrayBuffer()),
  ]);
  const known = new Map();
  const read = (name) => {
    const { type, shape, offset } = info.arrays[name];
    const size = shape.reduce((a, b) => a * b, 1);
    if (type === "uint8") return new Uint8Array(data, offset, size);
    if (type === "float32") return new Float32Array(data, offset, size);
    return fromHalf(new Uint16Array(data, offset, size));
  };
  const array = (name) => {
    if (!(name in info.arrays)) return null;
    if (!known.has(name)) known.set(name, read(name));
    return known.get(name);
  };
  return { info, array, network: new Network(info, array), codes: new Codes(info, array) };
}

function open(url) {
  if (!models.has(url)) models.set(url, load(url));
  return models.get(url);
}

/** Let messages arrive between two images, and stop if the request was cancelled. */
async function pause(id) {
  await new Promise((done) => setTimeout(done));
  if (cancelled.has(id)) throw new Error("cancelled");
}

async function decodeAll(id, network, all) {
  const images = [];
  for (const z of all) {
    images.push(network.decode(z));
    await pause(id);
  }
  const bytes = new Uint8Array(images.length * images[0].length);
  images.forEach((image, i) => bytes.set(image, i * image.length));
  return bytes;
}

const rows = (pixels, [channels, height, width]) =>
  Array.from({ length: height }, (_, y) => Array.from({ length: width }, (__, x) =>
    Array.from(pixels.subarray((y * width + x) * channels, (y * width + x + 1) * channels))));

const METHODS = {
  info: ({ info }) => info,
  decode: ({ network, codes }, id, code) => new Uint8Array(network.decode(codes.preactivation(code))),
  draw: ({ codes }, id, ...args) => codes.draw(...args),
  python: ({ codes }, id, code) => codes.python(code),
  mapCode: ({ codes }, id, ...args) => codes.onMap(...args),
  array: ({ array }, id, name) => array(name),

  image({ info, array }, id, index) {
    const size = info.image_shape.reduce((a, b) => a * b);
    return array("images").subarray(index * size, (index + 1) * size);
  },

  traversal({ info, network, codes }, id, expert, code) {
    const own = code.experts.find((each) => each.expert === expert)
      ?? { expert, offsets: [], magnitude: 1, negative: false };
    const others = code.experts.filter((each) => each !== own);
    const varied = Array.from({ length: info.parameters }, (_, d) => info.steps.map((step) => {
      const offsets = Array.from({ length: info.parameters }, (__, i) =>
        (i === d ? step : own.offsets[i] ?? 0));
      return codes.preactivation({ experts: [...others, { ...own, offsets }] });
    }));
    return decodeAll(id, network, varied.flat());
  },

  async interpolate({ network, codes }, id, start, end, steps) {
    const [a, b] = [start, end].map((code) => codes.preactivation(code));
    const all = Array.from({ length: steps }, (_, i) =>
      a.map((value, at) => value + (b[at] - value) * i / (steps - 1)));
    return {
      codes: all.map((z) => codes.settings(z)), images: await decodeAll(id, network, all),
    };
  },

  async encode({ info, network, codes }, id, blob, options) {
    const { pixels, inverted } = await readPicture(blob, info, options);
    const { code, z, firing, freeEnergy, routing } = network.encode(pixels);
    return {
      inverted,
      firing,
      free_energy: freeEnergy,
      picture: codes.settings(z),
      image: rows(pixels, info.image_shape),
      reconstruction: rows(network.decodeSquashed(code), info.image_shape),
      routing,
    };
  },
};

addEventListener("message", async ({ data: { id, url, method, args } }) => {
  if (method === "cancel") {
    cancelled.add(id);
    return;
  }
  try {
    postMessage({ id, result: await METHODS[method](await open(url), id, ...args) });
  } catch (error) {
    postMessage({ id, error: error.message });
  }
  cancelled.delete(id);
});
