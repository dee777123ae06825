// Builds elements. Text is always a text node: nothing here parses HTML.

// Attributes: `on...` adds a listener, `class`, `data-...`, `aria-...` and the rest are attributes; true is an empty
// attribute, false, null and undefined are none; `value`, `checked`, `disabled` and `hidden` are properties.
const PROPERTIES = new Set(["value", "checked", "disabled", "hidden", "selected", "textContent"]);

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (PROPERTIES.has(name)) node[name] = value;
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, String(value));
  }
  append(node, children);
  return node;
}

export function append(node, children) {
  for (const child of children.flat()) {
    if (child != null && child !== false) node.append(child instanceof Node ? child : String(child));
  }
  return node;
}

export function replace(node, ...children) {
  node.replaceChildren();
  return append(node, children);
}

let number = 0;
export function freshId(prefix = "id") {
  return `${prefix}-${++number}`;
}

// A labelled form control.
export function field(label, control, hint) {
  control.id ||= freshId("field");
  const text = el("label", { for: control.id }, label);
  if (!hint) return el("div", { class: "field" }, text, control);
  const note = el("p", { class: "hint", id: `${control.id}-hint` }, hint);
  control.setAttribute("aria-describedby", note.id);
  return el("div", { class: "field" }, text, control, note);
}

// Whether there is no mouse: a finger cannot point at anything without tapping it.
export function touched() {
  return matchMedia("(hover: none)").matches;
}

// Scrolls until a panel is seen; if it is higher than the view, from its heading on.
export function reveal(panel) {
  panel.scrollIntoView({ block: "nearest" });
  panel.querySelector("h3")?.scrollIntoView({ block: "nearest" });
}

export function button(text, onclick, attributes = {}) {
  return el("button", { type: "button", onclick, ...attributes }, text);
}
