"use strict";

const SVG = "http://www.w3.org/2000/svg";

/**
 * Sets attributes and adds children. Texts are text, whatever is in them.
 * @template {Element} T
 * @param {T} made
 * @param {Record<string, string | number | null>} attributes
 * @param {(Node | string)[]} children
 */
function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null) made.setAttribute(name, String(value));
  }
  made.append(...children);
  return made;
}

/** @param {string} tag @param {Record<string, string | number | null>} attributes @param {...(Node | string)} children */
const element = (tag, attributes = {}, ...children) => filled(document.createElement(tag), attributes, children);

/** @param {string} tag @param {Record<string, string | number | null>} attributes @param {...(Node | string)} children */
const drawn = (tag, attributes = {}, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);

/** @param {string} text @param {() => void} act @param {Record<string, string | number | null>} attributes */
function button(text, act, attributes = {}) {
  const made = element("button", { type: "button", ...attributes }, text);
  made.addEventListener("click", act);
  return made;
}

/** A button that stays pressed. @param {string} text @param {(pressed: boolean) => void} act */
function toggle(text, act) {
  const made = button(text, () => {
    const pressed = made.getAttribute("aria-pressed") !== "true";
    made.setAttribute("aria-pressed", String(pressed));
    act(pressed);
  }, { "aria-pressed": "true" });
  return made;
}

/** A model's own name: never translated, kept from turning the text around it, broken after a dot. @param {string} text */
const named = (text) => element("bdi", { class: "name", translate: "no" },
  ...text.split(/(?<=[._/])/u).flatMap((part, number) => (number ? [element("wbr"), part] : [part])));

/** A name that leads somewhere. @param {string} text @param {() => void} act */
function namedLink(text, act) {
  const made = button("", act, { class: "link" });
  made.append(named(text));
  return made;
}

/** @param {string} id @returns {HTMLElement} */
function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no #${id}`);
  return found;
}

/** Calls a function at the next frame, once, however often it is asked to. @param {() => void} act */
function oncePerFrame(act) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      act();
    });
  };
}

/** The class that gives a holding its colour. @param {string} holding */
const colourOf = (holding) => `held-${holding.replaceAll(" ", "-")}`;
