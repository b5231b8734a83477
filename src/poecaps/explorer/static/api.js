// Requests to the server, and the order in which responses are used.

const TIMEOUT = 20_000; // milliseconds
const MAX_ATTEMPTS = 6; // of a request that a busy server rejects

export class RequestError extends Error {}

const pause = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

/** Send a request. A busy server (status 429) is asked again, after a longer pause each time. */
async function request(url, { signal, ...options } = {}) {
  for (let attempt = 1; ; attempt += 1) {
    const ended = AbortSignal.any([AbortSignal.timeout(TIMEOUT), ...(signal ? [signal] : [])]);
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
const modelUrl = (model, path) => `/api/models/${encodeURIComponent(model)}${path}`;
const bytes = async (response) => new Uint8Array(await response.arrayBuffer());

export const models = async () => (await request("/api/models")).json();
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

const walk = async (name, path, body, signal) =>
  (await request(modelUrl(name, path), post(body, signal))).json();
export const startChains = (name, body, signal) => walk(name, "/chains", body, signal);
export const stepChains = (name, body, signal) => walk(name, "/chains/steps", body, signal);

/** Requests of which only the latest matters: a new one cancels the previous one. */
export class LatestRequest {
  #controller = new AbortController();

  /** Send a request, and use its result unless a newer one was sent meanwhile. */
  async run(send, onResult, onError) {
    this.cancel();
    const { signal } = this.#controller;
    try {
      const result = await send(signal);
      if (!signal.aborted) onResult(result);
    } catch (error) {
      if (!signal.aborted) onError(error);
    }
  }

  cancel() {
    this.#controller.abort();
    this.#controller = new AbortController();
  }
}

/**
 * Requests that are made faster than they are answered, as by dragging a slider. A few are in
 * progress at a time, a newer request replaces the waiting one, and a result is used only if no
 * newer one was.
 */
export class RequestStream {
  #requested = 0;
  #shown = 0;
  #inProgress = 0;
  #waiting = null;
  #controller = new AbortController();

  constructor(maxInProgress = 2) {
    this.maxInProgress = maxInProgress;
  }

  run(send, onResult, onError) {
    this.#waiting = { number: ++this.#requested, send, onResult, onError };
    this.#next();
  }

  /** Discard all requests, for example when another model is opened. */
  cancel() {
    this.#controller.abort();
    this.#controller = new AbortController();
    this.#waiting = null;
    this.#shown = this.#requested;
  }

  async #next() {
    if (!this.#waiting || this.#inProgress >= this.maxInProgress) return;
    const { number, send, onResult, onError } = this.#waiting;
    const { signal } = this.#controller;
    this.#waiting = null;
    this.#inProgress += 1;
    try {
      const result = await send(signal);
      if (!signal.aborted && number > this.#shown) {
        this.#shown = number;
        onResult(result, number);
      }
    } catch (error) {
      if (!signal.aborted && number > this.#shown) onError(error);
    } finally {
      this.#inProgress -= 1;
      this.#next();
    }
  }
}
