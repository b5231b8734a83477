// Undo, redo, and the browser's Back and Forward: one entry of the browser's history per change.

import { byId, enable } from "./dom.js";
import { copyState, fitsInLink, fromFragment, toFragment } from "./state.js";

const IDLE = 400; // milliseconds without a change after which a change is complete

export class Timeline {
  #states = new Map(); // by the number of the entry; after a reload, links are read instead
  #number = 0;
  #last = 0;
  #timer = 0;

  /** `page` has the state, `onReturn(state)` is called to return to another one. */
  constructor(page, onReturn) {
    this.page = page;
    this.onReturn = onReturn;
    byId("undo").addEventListener("click", () => this.#go(-1));
    byId("redo").addEventListener("click", () => this.#go(1));
    addEventListener("popstate", ({ state }) => this.#return(state));
    addEventListener("keydown", (event) => {
      if (!(event.ctrlKey || event.metaKey) || event.altKey) return;
      if (event.target.matches?.("input[type=number]")) return; // which undo their own text
      const key = event.key.toLowerCase();
      if (key !== "z" && key !== "y") return;
      event.preventDefault();
      this.#go(key === "y" || event.shiftKey ? 1 : -1);
    });
  }

  /** Start with the state of the page, in place of the current entry. */
  start() {
    this.#number = this.#last = history.state?.number ?? 0;
    this.#write("replaceState");
  }

  /** Add an entry once the state does not change any more. */
  add() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.addNow(), IDLE);
  }

  addNow() {
    clearTimeout(this.#timer);
    if (toFragment(this.page.state) === location.hash && this.#isSameImage()) {
      this.#states.set(this.#number, copyState(this.page.state));
      return;
    }
    this.#last = this.#number += 1;
    this.#write("pushState");
  }

  /** Change the current entry, for what is not worth an undo. */
  replace() {
    this.#write("replaceState");
  }

  /** Return whether an image that is too large for a link is that of the current entry. */
  #isSameImage() {
    const { pixels, source } = this.page.state;
    return !pixels || fitsInLink(pixels) || this.#states.get(this.#number)?.source === source;
  }

  #write(how) {
    history[how]({ number: this.#number }, "", toFragment(this.page.state));
    this.#states.set(this.#number, copyState(this.page.state));
    this.#show();
  }

  #go(steps) {
    this.addNow(); // a change in progress can be undone as well
    if (steps < 0 ? this.#number > 0 : this.#number < this.#last) history.go(steps);
  }

  #return(entry) {
    clearTimeout(this.#timer);
    if (entry === null) { // the address was edited
      this.#last = this.#number += 1;
      history.replaceState({ number: this.#number }, "");
    } else {
      this.#number = entry.number;
      this.#last = Math.max(this.#last, this.#number);
    }
    const known = entry === null ? null : this.#states.get(this.#number);
    this.#show();
    this.onReturn(known ? copyState(known) : fromFragment(location.hash));
  }

  #show() {
    enable(byId("undo"), this.#number > 0, byId("redo"), this.#number < this.#last);
  }
}
