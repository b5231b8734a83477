// Requests to the explorer, and who may answer when several are under way.

const PATIENCE = 20_000; // milliseconds until a request counts as lost
const TRIES = 6; // of a request that the server is too busy for

export class AskError extends Error {}

const pause = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

/** Ask the explorer. A server that is busy (429) is asked again, a little later each time. */
async function ask(path, { signal, ...options } = {}) {
  for (let attempt = 1; ; attempt += 1) {
    const ended = AbortSignal.any([AbortSignal.timeout(PATIENCE), ...(signal ? [signal] : [])]);
    let response;
    try {
      response = await fetch(path, { ...options, signal: ended });
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new AskError("The explorer does not answer. Is it still running?");
    }
    if (response.ok) return response;
    if (response.status === 429 && attempt < TRIES) {
      await pause(100 * attempt * (1 + Math.random()));
      signal?.throwIfAborted();
      continue;
    }
    const why = await response.json().then((answer) => answer.error, () => response.statusText);
    throw new AskError(why);
  }
}

const asJson = (body, signal) => ({
  method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json" }, signal,
});
const at = (model, path) => `/api/models/${encodeURIComponent(model)}${path}`;
const bytes = async (response) => new Uint8Array(await response.arrayBuffer());

export const models = async () => (await ask("/api/models")).json();
export const model = async (name) => (await ask(at(name, ""))).json();
export const typicalAddress = (name, expert) => at(name, `/experts/${expert}/typical`);
export const decode = async (name, picture, signal) =>
  bytes(await ask(at(name, "/decode?as=pixels"), asJson(picture, signal)));
export const png = async (name, picture, scale) =>
  (await ask(at(name, `/decode?scale=${scale}`), asJson(picture))).blob();
export const python = async (name, picture, signal) =>
  (await (await ask(at(name, "/python"), asJson(picture, signal))).json()).lines;
export const traversal = async (name, expert, picture, signal) =>
  bytes(await ask(at(name, `/experts/${expert}/traversal?as=pixels`), asJson(picture, signal)));
export const sheetPng = async (name, expert, picture) =>
  (await ask(at(name, `/experts/${expert}/traversal?scale=2`), asJson(picture))).blob();
export const testImage = async (name, index, signal) => (await ask(at(name, `/images/${index}`), { signal })).blob();

export async function draw(name, domain, expert, seed, signal) {
  const query = new URLSearchParams({ domain, expert, seed });
  return (await ask(at(name, `/draw?${query}`), { signal })).json();
}

export async function encode(name, blob, { centre, invert }, signal) {
  const query = new URLSearchParams({ centre, invert });
  const headers = { "content-type": blob.type || "image/png" };
  return (await ask(at(name, `/encode?${query}`), { method: "POST", body: blob, headers, signal })).json();
}

/** Of several questions only the last is of interest: a new one ends those before it. */
export class Latest {
  #controller = new AbortController();

  /** Ask, and use the answer unless there was a newer question meanwhile. */
  async run(question, use, complain) {
    this.cancel();
    const { signal } = this.#controller;
    try {
      const answer = await question(signal);
      if (!signal.aborted) use(answer);
    } catch (error) {
      if (!signal.aborted) complain(error);
    }
  }

  cancel() {
    this.#controller.abort();
    this.#controller = new AbortController();
  }
}

/**
 * Questions that come faster than answers, as from a slider that is dragged: a few are under way at once, what waits is
 * replaced by what is newer, and an answer is used only if no newer one was.
 */
export class Stream {
  #asked = 0;
  #shown = 0;
  #underWay = 0;
  #waiting = null;
  #controller = new AbortController();

  constructor(most = 2) {
    this.most = most;
  }

  run(question, use, complain) {
    this.#waiting = { number: ++this.#asked, question, use, complain };
    this.#next();
  }

  /** Forget everything that was asked, as when another model is opened. */
  cancel() {
    this.#controller.abort();
    this.#controller = new AbortController();
    this.#waiting = null;
    this.#shown = this.#asked;
  }

  async #next() {
    if (!this.#waiting || this.#underWay >= this.most) return;
    const { number, question, use, complain } = this.#waiting;
    const { signal } = this.#controller;
    this.#waiting = null;
    this.#underWay += 1;
    try {
      const answer = await question(signal);
      if (!signal.aborted && number > this.#shown) {
        this.#shown = number;
        use(answer, number);
      }
    } catch (error) {
      if (!signal.aborted && number > this.#shown) complain(error);
    } finally {
      this.#underWay -= 1;
      this.#next();
    }
  }
}
