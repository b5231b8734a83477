// Small helpers for the page.

export const byId = (id) => document.getElementById(id);

/** Make an element with properties, attributes (aria and role) and children. */
export function make(tag, { aria = {}, data = {}, ...properties } = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  for (const [name, value] of Object.entries(aria)) element.setAttribute(name === "role" ? name : `aria-${name}`, value);
  Object.assign(element.dataset, data);
  element.append(...children);
  return element;
}

/** Call only when a while has passed without another call. */
export function afterwards(milliseconds, action) {
  let timer = 0;
  const later = () => {
    clearTimeout(timer);
    timer = setTimeout(action, milliseconds);
  };
  later.now = () => {
    clearTimeout(timer);
    action();
  };
  return later;
}

let hiding = 0;

export function say(text) {
  byId("message").textContent = text;
  clearTimeout(hiding);
  hiding = setTimeout(() => byId("message").replaceChildren(), 4000);
}

export function complain(error) {
  byId("alert").textContent = error.message;
}

export const forgive = () => byId("alert").replaceChildren();

export function save(blob, name) {
  const address = URL.createObjectURL(blob);
  make("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** Copy text, or, where the browser forbids it, select it for the person to copy. */
export async function copy(text, what, fallback) {
  try {
    await navigator.clipboard.writeText(text);
    say(`${what} copied.`);
  } catch {
    if (fallback) getSelection().selectAllChildren(fallback);
    say(fallback ? "Selected; press Ctrl+C to copy." : `Copy the address of this page: it is the link.`);
  }
}
