// Small helpers for the page.

export const byId = (id) => document.getElementById(id);

/** Create an element with properties, attributes (aria and role) and children. */
export function create(tag, { aria = {}, data = {}, ...properties } = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  for (const [name, value] of Object.entries(aria)) {
    element.setAttribute(name === "role" ? name : `aria-${name}`, value);
  }
  Object.assign(element.dataset, data);
  element.append(...children);
  return element;
}

/** Create an element of a vector graphic. */
export function createSvg(tag, attributes = {}) {
  const element = document.createElementNS(document.querySelector("svg").namespaceURI, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** Enable each of two buttons or not; the focus of one that is disabled goes to the other. */
export function enable(first, isFirst, second, isSecond) {
  const focused = document.activeElement; // lost once the button is disabled
  first.disabled = !isFirst;
  second.disabled = !isSecond;
  if (focused === first && !isFirst) second.focus({ preventScroll: true });
  if (focused === second && !isSecond) first.focus({ preventScroll: true });
}

/** Return a function that calls `action` once it was not called again for a while. */
export function debounce(milliseconds, action) {
  let timer = 0;
  const debounced = () => {
    clearTimeout(timer);
    timer = setTimeout(action, milliseconds);
  };
  debounced.now = () => {
    clearTimeout(timer);
    action();
  };
  return debounced;
}

let hideTimer = 0;

export function notify(text) {
  byId("message").textContent = text;
  clearTimeout(hideTimer);
  hideTimer = setTimeout(() => byId("message").replaceChildren(), 4000);
}

export function showError(error) {
  byId("alert").textContent = error.message;
}

export const clearError = () => byId("alert").replaceChildren();

export function download(blob, name) {
  const url = URL.createObjectURL(blob);
  create("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** Copy text or, if the browser does not allow it, select the text in an element. */
export async function copyText(text, description, element) {
  try {
    await navigator.clipboard.writeText(text);
    notify(`${description} copied.`);
  } catch {
    if (element) getSelection().selectAllChildren(element);
    notify(element ? "Selected; press Ctrl+C to copy." : "Copy the address of this page.");
  }
}
