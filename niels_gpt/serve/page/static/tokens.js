// The tokens of a reply as text. A cell is the shortest run of tokens that is whole characters; over bytes, a
// character of several bytes is one cell.

import { el, freshId, replace, touched } from "./dom.js";
import { bits, decodeBytes, incomplete, percent, visible } from "./format.js";

export class TokenView {
  // onPick(index): a token was clicked, or chosen with the arrow keys. onFork(index, alternative): see tokenDetails.
  constructor({ onPick, onFork }) {
    this.onPick = onPick;
    this.onFork = onFork;
    this.tokens = [];
    this.cells = [];
    this.chosen = -1;
    this.inspecting = false;
    this.pending = [];
    this.element = el("div", {
      class: "tokens",
      onclick: (event) => this.#clicked(event),
      onkeydown: (event) => this.#key(event),
      onmouseover: (event) => this.#hovered(event),
      onmouseleave: () => hidePopover(),
    });
  }

  set(tokens) {
    hidePopover(0);
    this.tokens = [];
    this.cells = [];
    this.pending = [];
    this.element.replaceChildren();
    this.push(tokens);
    this.flush();
    this.inspect(this.inspecting);
  }

  push(tokens) {
    for (const token of tokens) {
      if ((token.bytes[0] & 0xc0) !== 0x80) this.flush(); // the character before stays incomplete
      this.pending.push(this.tokens.length);
      this.tokens.push(token);
      const bytes = this.pending.flatMap((index) => this.tokens[index].bytes);
      if (!incomplete(bytes)) this.#addCell(bytes);
    }
  }

  // What is not a whole character is shown as U+FFFD.
  flush() {
    if (this.pending.length) this.#addCell(this.pending.flatMap((index) => this.tokens[index].bytes));
  }

  #addCell(bytes) {
    const first = this.pending[0];
    const logprobs = this.pending.map((index) => this.tokens[index].logprob);
    const text = decodeBytes(bytes);
    const node = el("span", { class: text.includes("\n") ? "token newline" : "token", "data-index": first }, text);
    if (logprobs.every((value) => value != null)) {
      const surprise = -Math.min(...logprobs) / Math.LN2; // bits
      node.style.setProperty("--surprise", Math.min(1, surprise / 7).toFixed(3));
    }
    this.cells.push({ node, first, last: this.tokens.length - 1 });
    this.pending = [];
    this.element.append(node);
    if (this.inspecting) this.#asOption(this.cells.at(-1));
  }

  // As a list of tokens for the keyboard and screen readers, instead of a text.
  inspect(on) {
    this.inspecting = on;
    if (on) hidePopover(0);
    this.element.classList.toggle("inspecting", on);
    const attributes = { role: "listbox", tabindex: "0", "aria-label": "Tokens of the reply", "aria-orientation": "horizontal" };
    for (const [name, value] of Object.entries(attributes)) {
      if (on && this.cells.length) this.element.setAttribute(name, value);
      else this.element.removeAttribute(name);
    }
    for (const cell of this.cells) {
      if (on) this.#asOption(cell);
      else for (const name of ["role", "id", "aria-selected"]) cell.node.removeAttribute(name);
    }
    if (!on) this.element.removeAttribute("aria-activedescendant");
  }

  #asOption({ node }) {
    node.id ||= freshId("token");
    node.setAttribute("role", "option");
    node.setAttribute("aria-selected", "false");
  }

  choose(index) {
    this.chosen = index;
    for (const { node, first, last } of this.cells) {
      const here = first <= index && index <= last;
      if (this.inspecting) node.setAttribute("aria-selected", String(here));
      if (here) {
        this.element.setAttribute("aria-activedescendant", node.id);
        if (document.activeElement === this.element) node.scrollIntoView({ block: "nearest" });
      }
    }
  }

  #cellOf(event) {
    const node = event.target.closest?.(".token");
    return node && this.cells.find((cell) => cell.node === node);
  }

  #clicked(event) {
    const cell = this.#cellOf(event);
    if (cell && !String(getSelection())) this.onPick(cell.first);
  }

  #key(event) {
    if (!this.inspecting || event.target !== this.element) return;
    const last = this.tokens.length - 1;
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity };
    if (!(event.key in steps) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.onPick(Math.max(0, Math.min(last, this.chosen + steps[event.key])));
  }

  #hovered(event) {
    const cell = this.#cellOf(event);
    if (!cell || this.inspecting || touched()) return; // the panel has the same
    const parts = [];
    for (let index = cell.first; index <= cell.last; index++) {
      if (this.tokens[index].logprob != null) parts.push(tokenDetails(this.tokens[index], this.onFork && ((other) => this.onFork(index, other)), -1));
    }
    if (parts.length) showPopover(cell.node, parts);
  }
}

// Probability, entropy and alternatives of a token. onFork(alternative): continue the reply from it.
export function tokenDetails(token, onFork, tabindex = 0) {
  const alternatives = token.top.map((other) => {
    const p = Math.exp(other.logprob);
    const chosen = other.id === token.id;
    const special = other.bytes.length === 0 && other.token !== "<eot>";
    const row = el(
      "button",
      {
        type: "button",
        class: "alternative",
        tabindex,
        disabled: chosen || special || !onFork,
        onclick: () => onFork(other),
        "aria-label": chosen
          ? `${other.token}, ${percent(p)}, the token of the reply`
          : `Fork the reply here with ${visible(other.token)}, ${percent(p)}`,
      },
      el("span", { class: "bar" }),
      el("code", {}, visible(other.token)),
      el("span", { class: "number" }, chosen ? `chosen, ${percent(p)}` : percent(p)),
    );
    row.style.setProperty("--share", p.toFixed(4));
    return el("li", {}, row);
  });
  return el(
    "div",
    { class: "details" },
    el("p", {}, el("code", { class: "what" }, visible(token.token)), ` ${percent(Math.exp(token.logprob))}`, el("span", { class: "muted" }, `, entropy ${bits(token.entropy)}`)),
    el("ul", { class: "alternatives", "aria-label": "Most likely tokens here" }, alternatives),
  );
}

// One popover for the page. Only the mouse sees it: the panel "Look inside" has the same for the keyboard.
const popover = el("div", {
  class: "popover", "aria-hidden": "true", hidden: true,
  onmouseenter: () => clearTimeout(hiding),
  onmouseleave: () => hidePopover(),
});
document.body.append(popover);
addEventListener("scroll", () => hidePopover(0), { capture: true, passive: true });
addEventListener("keydown", (event) => { if (event.key === "Escape") hidePopover(0); });
let hiding = 0;
const NEAR = 80; // pixels that the mouse can cross before the popover hides

function showPopover(anchor, parts) {
  clearTimeout(hiding);
  replace(popover, parts);
  popover.hidden = false;
  const at = anchor.getClientRects()[0] ?? anchor.getBoundingClientRect();
  const { width, height } = popover.getBoundingClientRect();
  const left = Math.max(8, Math.min(at.left, innerWidth - width - 8));
  popover.style.left = `${left}px`;
  popover.style.top = `${freeTop(anchor, at, left, width, height)}px`;
}

// Where the popover covers the fewest controls, above all those of the reply itself: below the token, above it, or
// below a short reply.
function freeTop(anchor, at, left, width, height) {
  const reply = anchor.closest(".reply");
  const end = reply.getBoundingClientRect().bottom;
  const tops = [at.bottom, at.top - height, ...(end - at.bottom < NEAR ? [end] : [])];
  const controls = [...document.querySelectorAll("a, button, input, select, summary, textarea")]
    .filter((node) => !popover.contains(node) && node.checkVisibility())
    .map((node) => ({ box: node.getBoundingClientRect(), cost: reply.contains(node) ? 10 : 1 }));
  const covered = (top) => controls
    .filter(({ box }) => box.left < left + width && left < box.right && box.top < top + height && top < box.bottom)
    .reduce((sum, { cost }) => sum + cost, 0);
  const found = tops
    .filter((top) => top >= 8 && top + height <= innerHeight - 8)
    .map((top) => ({ top, cost: covered(top) }))
    .sort((a, b) => a.cost - b.cost);
  return found[0]?.top ?? 8;
}

export function hidePopover(after = 300) {
  clearTimeout(hiding);
  hiding = setTimeout(() => (popover.hidden = true), after);
}
