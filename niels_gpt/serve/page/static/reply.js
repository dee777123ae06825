// One reply: its tokens, what is known of it, and the panels "Look inside" and "Where from".

import { post } from "./api.js";
import { button, el, reveal, touched } from "./dom.js";
import { plural } from "./format.js";
import { InsidePanel } from "./inside.js";
import { guarded } from "./notice.js";
import { provenancePanel } from "./provenance.js";
import { hidePopover, TokenView } from "./tokens.js";

const ENDS = {
  stop: "ended by itself",
  length: "reached the longest reply",
  aborted: "stopped",
  failed: "cut off by an error",
};
const scored = new WeakMap(); // reply -> its tokens with probabilities; not kept in the browser's storage

// A reply is {content, ids, started, model, seed, finished, seconds}: ids are its tokens (null if it was written by
// hand), and the first `started` of them were given, because it was forked there.
export function newReply(model, seed, start = []) {
  return { role: "assistant", content: "", ids: start.map((token) => token.id), started: start.length, model, seed, finished: null, seconds: 0 };
}

export function setTokens(reply, tokens) {
  scored.set(reply, tokens);
  reply.ids = tokens.map((token) => token.id);
}

export class ReplyView {
  // prompt: {model, messages} or {model, text}. model: as in /v1/models, undefined if it is not loaded.
  // onFork(tokens, finished): a reply that begins with these tokens; finished: that is all of it.
  // buttons: further ones for the toolbar.
  constructor({ reply, prompt, model, onFork, buttons = [] }) {
    Object.assign(this, { reply, prompt, model, onFork });
    this.view = new TokenView({ onPick: guarded((index) => this.#pick(index)), onFork: (index, other) => this.#fork(index, other) });
    this.facts = el("p", { class: "facts hint" });
    this.panels = el("div");
    this.insideButton = button("Look inside", guarded(() => this.#toggleInside()), { class: "small quiet toggle", "aria-expanded": "false" });
    this.whereButton = button("Where from?", () => this.#toggleProvenance(), { class: "small quiet toggle", "aria-expanded": "false" });
    this.toolbar = el("div", { class: "row toolbar" }, this.insideButton, this.whereButton, buttons, this.facts);
    this.element = el("div", { class: "reply" }, this.view.element, this.toolbar, this.panels);
    const tokens = scored.get(reply);
    if (tokens) this.view.set(tokens);
    else this.#showEarlier();
    this.finish();
  }

  // While the reply streams.
  push(tokens) {
    this.view.push(tokens);
  }

  live(on) {
    this.element.setAttribute("aria-busy", String(on));
    this.toolbar.hidden = on;
    if (!on) {
      this.view.set(scored.get(this.reply) ?? []);
      this.finish();
    }
  }

  finish() {
    const { reply } = this;
    const known = Boolean(reply.ids?.length && this.model);
    this.insideButton.hidden = !known;
    this.whereButton.hidden = !(reply.content && this.model);
    const rate = reply.seconds > 0 && reply.ids ? `, ${Math.round((reply.ids.length - reply.started) / reply.seconds)}/s` : "";
    this.facts.textContent = reply.ids
      ? [reply.model, plural(reply.ids.length, "token") + rate, `seed ${reply.seed}`, ENDS[reply.finished]].filter(Boolean).join(" · ")
      : "edited by hand";
  }

  async #pick(index) {
    if (!this.inside) await this.#toggleInside();
    if (!this.inside || this.toolbar.hidden) return;
    this.view.choose(index);
    this.inside.show(this.view.tokens, index);
  }

  async #toggleInside() {
    if (this.toolbar.hidden) return; // it streams
    if (this.inside) {
      this.inside.element.remove();
      this.inside = null;
      this.view.inspect(false);
      this.insideButton.setAttribute("aria-expanded", "false");
      return;
    }
    if (!this.model || !this.reply.ids?.length) return;
    await this.#load();
    this.inside = new InsidePanel({ prompt: this.prompt, model: this.model, started: this.reply.started, onFork: this.onFork && ((index, other) => this.#fork(index, other)) });
    this.panels.prepend(this.inside.element);
    this.view.inspect(true);
    this.insideButton.setAttribute("aria-expanded", "true");
    this.view.element.focus({ preventScroll: true });
    await this.#pick(Math.max(0, this.view.chosen));
    this.inside?.body.scrollIntoView({ block: "nearest" });
  }

  // A reply of an earlier visit has no probabilities until someone points at it.
  #showEarlier() {
    const { element } = this.view;
    element.textContent = this.reply.content;
    if (!this.model || !this.reply.ids?.length) return;
    const unknown = () => !scored.has(this.reply) && !this.toolbar.hidden;
    element.addEventListener("mouseenter", guarded(async () => { if (unknown() && !touched()) await this.#load(); }));
    element.addEventListener("click", guarded(async () => { if (unknown() && !String(getSelection())) await this.#toggleInside(); }));
  }

  async #load() {
    if (scored.has(this.reply)) return;
    const { ids, started } = this.reply;
    const { tokens } = await post("/api/tokens", { ...this.prompt, reply: ids, started, top_logprobs: 6 });
    scored.set(this.reply, tokens);
    this.view.set(tokens);
  }

  #toggleProvenance() {
    hidePopover(0);
    const on = !this.provenance;
    if (on) {
      this.panels.append((this.provenance = provenancePanel(this.reply.model, this.reply.content)));
      reveal(this.provenance); // it opens below "Look inside"
    } else {
      this.provenance.remove();
      this.provenance = null;
    }
    this.whereButton.setAttribute("aria-expanded", String(on));
  }

  // The alternative takes the place of a token; it has the probability and the alternatives of that position.
  #fork(index, other) {
    const before = this.view.tokens.slice(0, index);
    if (other.bytes.length === 0) this.onFork(before, true); // the end of the turn
    else this.onFork([...before, { ...this.view.tokens[index], ...other }], false);
  }
}

