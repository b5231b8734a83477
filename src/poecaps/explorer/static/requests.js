// The order in which results are used that arrive later than others.

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
