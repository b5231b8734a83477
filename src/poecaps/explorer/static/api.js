// Requests to the server. A static build has the same functions without a server, in local.js.

import { fromBase64 } from "./state.js";

const TIMEOUT = 20_000; // milliseconds
const MAP_TIMEOUT = 55_000; // of a map, for which many images are encoded
const MAX_ATTEMPTS = 6; // of a request that a busy server rejects

export const hasServer = true;

export class RequestError extends Error {}

const pause = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

/** Send a request. A busy server (status 429) is asked again, after a longer pause each time. */
async function request(url, { signal, timeout = TIMEOUT, ...options } = {}) {
  for (let attempt = 1; ; attempt += 1) {
    const ended = AbortSignal.any([AbortSignal.timeout(timeout), ...(signal ? [signal] : [])]);
    let response;
    try {
      response = await fetch(url, { ...options, signal: ended });
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new RequestError("The explorer does not respond. Is it still running?");
    }
    if (response.ok) return response;
    if (response.status === 429 && attempt < MAX_ATTEMPTS) {
      await pause(100 * attempt * (1 + Math.random()));
      signal?.throwIfAborted();
      continue;
    }
    const reason = await response.json().then(({ error }) => error, () => response.statusText);
    throw new RequestError(reason);
  }
}

const post = (body, signal) => ({
  method: "POST",
  body: JSON.stringify(body),
  headers: { "content-type": "application/json" },
  signal,
});
const modelUrl = (model, path) => `api/models/${encodeURIComponent(model)}${path}`;
const bytes = async (response) => new Uint8Array(await response.arrayBuffer());

export const models = async () => (await request("api/models")).json();
export const model = async (name) => (await request(modelUrl(name, ""))).json();
export const typicalImageUrl = (name, expert) => modelUrl(name, `/experts/${expert}/typical`);
export const decode = async (name, code, signal) =>
  bytes(await request(modelUrl(name, "/decode?as=pixels"), post(code, signal)));
export const decodePng = async (name, code, scale) =>
  (await request(modelUrl(name, `/decode?scale=${scale}`), post(code))).blob();
export const python = async (name, code, signal) =>
  (await (await request(modelUrl(name, "/python"), post(code, signal))).json()).lines;

export async function traversal(name, expert, code, signal) {
  const url = modelUrl(name, `/experts/${expert}/traversal?as=pixels`);
  return bytes(await request(url, post(code, signal)));
}

export async function traversalPng(name, expert, code) {
  const url = modelUrl(name, `/experts/${expert}/traversal?scale=2`);
  return (await request(url, post(code))).blob();
}

export const testImage = async (name, index, signal) =>
  (await request(modelUrl(name, `/images/${index}`), { signal })).blob();

export async function draw(name, domain, expert, seed, signal) {
  const query = new URLSearchParams({ domain, expert, seed });
  return (await request(modelUrl(name, `/draw?${query}`), { signal })).json();
}

export async function encode(name, blob, { centre, invert }, signal) {
  const query = new URLSearchParams({ centre, invert });
  const headers = { "content-type": blob.type || "image/png" };
  const options = { method: "POST", body: blob, headers, signal };
  return (await request(modelUrl(name, `/encode?${query}`), options)).json();
}

export const effects = async (name, expert, signal) =>
  (await request(modelUrl(name, `/experts/${expert}/effects`), { signal })).json();

const mapQuery = (expert, values = {}) =>
  new URLSearchParams({ ...values, ...(expert === null ? {} : { expert }) });

/** Return the map of an expert or, with null, of all experts. */
export async function map(name, expert, signal) {
  const url = modelUrl(name, `/map?${mapQuery(expert)}`);
  const found = await (await request(url, { signal, timeout: MAP_TIMEOUT })).json();
  return { ...found, images: fromBase64(found.images) };
}

export async function mapCode(name, expert, x, y, signal) {
  return (await request(modelUrl(name, `/map/code?${mapQuery(expert, { x, y })}`), { signal })).json();
}

export async function interpolate(name, start, end, steps, signal) {
  const url = modelUrl(name, "/interpolation");
  const found = await (await request(url, post({ start, end, steps }, signal))).json();
  return { ...found, images: fromBase64(found.images) };
}

export const trainingSources = async () => (await request("api/training/sources")).json();
export const startTraining = async (body) => (await request("api/training/start", post(body))).json();
export const training = async (since, signal) =>
  (await request(`api/training?since=${since}`, { signal })).json();
export const stopTraining = async () =>
  (await request("api/training/stop", { method: "POST" })).json();

const walk = async (name, path, body, signal) =>
  (await request(modelUrl(name, path), post(body, signal))).json();
export const startChains = (name, body, signal) => walk(name, "/chains", body, signal);
export const stepChains = (name, body, signal) => walk(name, "/chains/steps", body, signal);
