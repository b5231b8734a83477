// What the page asks for, computed in the browser: the functions of the api.js that asks a server.

import { drawPixels, toPng } from "./canvas.js";

export const hasServer = false;

export class RequestError extends Error {}

let files = null; // by the names of the models
const infos = new Map();
const url = (name) => new URL(`models/${files[name]}`, location.href).href;

/** A worker that computes; long computations have one of their own, so that sliders stay quick. */
class Computer {
  #worker = null;
  #calls = new Map();
  #number = 0;

  call(name, method, args = [], signal = null) {
    this.#worker ??= this.#start();
    const id = this.#number += 1;
    return new Promise((resolve, reject) => {
      this.#calls.set(id, { resolve, reject });
      signal?.addEventListener("abort", () => {
        this.#worker.postMessage({ id, method: "cancel" });
        reject(signal.reason);
      });
      this.#worker.postMessage({ id, url: url(name), method, args });
    });
  }

  #start() {
    const worker = new Worker("worker.js", { type: "module" });
    worker.addEventListener("message", ({ data: { id, result, error } }) => {
      const { resolve, reject } = this.#calls.get(id);
      this.#calls.delete(id);
      if (error === undefined) resolve(result);
      else reject(new RequestError(error));
    });
    worker.addEventListener("error", () => {
      for (const { reject } of this.#calls.values()) {
        reject(new RequestError("The model cannot be computed in this browser."));
      }
    });
    return worker;
  }
}

const quick = new Computer();
const slow = new Computer();

export async function models() {
  files = await (await fetch("models.json")).json();
  return Object.keys(files);
}

export async function model(name) {
  if (!infos.has(name)) infos.set(name, await quick.call(name, "info"));
  return infos.get(name);
}

export const typicalImageUrl = (name, expert) => infos.get(name).typical[expert];
export const decode = (name, code, signal) => quick.call(name, "decode", [code], signal);
export const python = (name, code, signal) => quick.call(name, "python", [code], signal);
export const draw = (name, domain, expert, seed, signal) =>
  quick.call(name, "draw", [domain, expert, seed], signal);
export const encode = (name, blob, options, signal) =>
  quick.call(name, "encode", [blob, options], signal);
export const traversal = (name, expert, code, signal) =>
  slow.call(name, "traversal", [expert, code], signal);
export const interpolate = (name, start, end, steps, signal) =>
  slow.call(name, "interpolate", [start, end, steps], signal);
export const mapCode = (name, expert, x, y, signal) =>
  quick.call(name, "mapCode", [expert, x, y], signal);
export const effects = async (name, expert) => (await model(name)).effects[expert];

export async function testImage(name, index, signal) {
  const pixels = await quick.call(name, "image", [index], signal);
  return toPng(pixels, (await model(name)).image_shape);
}

export async function map(name, expert, signal) {
  const info = await model(name);
  const own = expert === null ? info.map : info.maps[expert];
  const images = await quick.call(name, "array", [
    expert === null ? "map.images" : `maps.${expert}.images`], signal);
  const filled = own.filled ?? new Array(own.columns ** 2).fill(true);
  return { explained: null, ...own, filled, images };
}

/** Return a PNG of images (rows, columns, H, W, C), each pixel as a square. */
async function sheet(bytes, columns, shape, scale) {
  const [channels, height, width] = shape;
  const size = channels * height * width;
  const line = columns > 1 ? scale : 0;
  const count = bytes.length / size;
  const page = document.createElement("canvas");
  Object.assign(page, {
    width: columns * (width * scale + line) - line,
    height: Math.ceil(count / columns) * (height * scale + line) - line,
  });
  const context = page.getContext("2d");
  context.fillStyle = "#808080";
  context.fillRect(0, 0, page.width, page.height);
  context.imageSmoothingEnabled = false;
  const image = document.createElement("canvas");
  for (let i = 0; i < count; i += 1) {
    drawPixels(image, bytes.subarray(i * size, (i + 1) * size), shape);
    const [x, y] = [i % columns, Math.floor(i / columns)];
    const [left, top] = [x * (width * scale + line), y * (height * scale + line)];
    context.drawImage(image, left, top, width * scale, height * scale);
  }
  return new Promise((done) => page.toBlob(done, "image/png"));
}

export async function decodePng(name, code, scale) {
  return sheet(await decode(name, code), 1, (await model(name)).image_shape, scale);
}

export async function traversalPng(name, expert, code) {
  const { steps, image_shape: shape } = await model(name);
  return sheet(await traversal(name, expert, code), steps.length, shape, 2);
}

const noServer = async () => {
  throw new RequestError("This page has no server.");
};
export const startChains = noServer;
export const stepChains = noServer;
export const trainingSources = noServer;
export const startTraining = noServer;
export const training = noServer;
export const stopTraining = noServer;
