// Look inside: the details of one token of a reply, attention when it was chosen, and the logit lens.

import { post } from "./api.js";
import { el, field, replace, touched } from "./dom.js";
import { percent, plural, visible } from "./format.js";
import { guarded } from "./notice.js";
import { tokenDetails } from "./tokens.js";

const opened = { attention: false, lens: false }; // also for the next token
const head = { layer: 0, head: 0 };

export class InsidePanel {
  // prompt: {model, messages} or {model, text}; started: as in /api/reply; model: as in /v1/models.
  constructor({ prompt, model, started, onFork, onClose }) {
    Object.assign(this, { prompt, model, started, onFork });
    this.body = el("div", { "aria-live": "polite" });
    this.attention = this.#section("attention", "Attention over the context", () => this.#loadAttention());
    this.lens = this.#section("lens", "Logit lens: what each layer would predict", () => this.#loadLens());
    this.element = el(
      "section",
      { class: "inside panel", "aria-label": "Look inside" },
      this.body,
      el("p", { class: "hint" }, `${touched() ? "Tap" : "Click on"} a token of the reply to choose it, or use the arrow keys. An alternative forks the reply: it is continued from there, and this version is kept.`),
      this.attention.node,
      this.lens.node,
    );
  }

  show(tokens, index) {
    this.tokens = tokens;
    this.index = index;
    const token = tokens[index];
    replace(
      this.body,
      el("h3", {}, `Token ${index + 1} of ${tokens.length}`),
      token.logprob == null
        ? el("p", {}, el("code", {}, visible(token.token)), " Its probability is not known.")
        : tokenDetails(token, this.onFork && ((other) => this.onFork(index, other))),
    );
    clearTimeout(this.waiting);
    this.waiting = setTimeout(() => {
      for (const section of [this.attention, this.lens]) if (section.node.open) section.load();
    }, 120);
  }

  #section(name, title, load) {
    const content = el("div", { class: "content" });
    const node = el("details", { open: opened[name], class: name }, el("summary", {}, title), content);
    const section = { node, content, load: guarded(load) };
    node.addEventListener("toggle", () => {
      opened[name] = node.open;
      if (node.open && this.tokens) section.load();
    });
    return section;
  }

  #context() {
    const reply = this.tokens.slice(0, this.index).map((token) => token.id);
    return { ...this.prompt, reply, started: Math.min(this.started, reply.length) };
  }

  async #loadAttention() {
    const index = this.index;
    head.layer = Math.min(head.layer, this.model.layers - 1);
    head.head = Math.min(head.head, this.model.heads - 1);
    const { layer, head: column } = head;
    const found = await post("/api/attention", { ...this.#context(), ...head });
    if (index !== this.index || layer !== head.layer || column !== head.head) return; // another was chosen meanwhile
    const largest = Math.max(...found.weights);
    const context = el("div", { class: "context", tabindex: "0", role: "img", "aria-label": "The context, darker where the head reads more; the table has the numbers" });
    found.tokens.forEach((token, i) => {
      const node = el("span", { class: "token", title: `${visible(token.token)} ${percent(found.weights[i])}` }, token.bytes.length ? token.token.replace(/^bytes:/, "") : token.token);
      node.style.setProperty("--weight", (found.weights[i] / largest).toFixed(3));
      context.append(node);
    });
    const order = found.weights.map((weight, i) => [weight, i]).sort((a, b) => b[0] - a[0]).slice(0, 6);
    const rows = order.map(([weight, i]) =>
      el("tr", {}, el("td", {}, el("code", {}, visible(found.tokens[i].token))), el("td", {}, `${found.tokens.length - 1 - i} back`), el("td", { class: "number" }, percent(weight))),
    );
    if (!this.attention.selects) {
      this.attention.selects = el("div", { class: "row" }, this.#number("Layer", "layer", this.model.layers), this.#number("Head", "head", this.model.heads));
      this.attention.view = el("div");
      replace(this.attention.content, this.attention.selects, this.attention.view);
    }
    replace(
      this.attention.view,
      found.dropped ? el("p", { class: "hint" }, `${plural(found.dropped, "older token")} had left the context.`) : null,
      context,
      el("table", {}, el("caption", {}, `What layer ${head.layer + 1}, head ${head.head + 1} reads most`), headRow("Token", "Position", "Weight"), el("tbody", {}, rows)),
    );
    context.scrollTop = context.scrollHeight;
  }

  #number(label, name, count) {
    const select = el(
      "select",
      { onchange: () => { head[name] = Number(select.value); this.attention.load(); } },
      Array.from({ length: count }, (_, i) => el("option", { value: i, selected: i === head[name] }, String(i + 1))),
    );
    return field(label, select);
  }

  async #loadLens() {
    const index = this.index;
    const found = await post("/api/logit_lens", { ...this.#context(), top: 4 });
    if (index !== this.index) return;
    const chosen = this.tokens[index].id;
    const rows = found.layers.map((layer, i) =>
      el(
        "tr",
        {},
        el("th", { scope: "row" }, String(i + 1)),
        layer.map((token) => {
          const cell = el("td", { class: token.id === chosen ? "chosen" : null }, el("code", {}, visible(token.token)), " ", el("span", { class: "number" }, percent(token.probability)));
          cell.style.setProperty("--weight", token.probability.toFixed(3));
          return cell;
        }),
      ),
    );
    replace(
      this.lens.content,
      el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Logit lens" },
        el("table", {}, el("caption", {}, "The token of the reply has a frame"), headRow("Layer", "1st", "2nd", "3rd", "4th"), el("tbody", {}, rows))),
    );
  }
}

function headRow(...names) {
  return el("thead", {}, el("tr", {}, names.map((name) => el("th", { scope: "col" }, name))));
}
