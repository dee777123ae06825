// Provenance: which parts of a reply are verbatim in the training text, and where.

import { post } from "./api.js";
import { el, replace, reveal } from "./dom.js";
import { plural } from "./format.js";

// A panel that searches at once. Errors are shown inside.
export function provenancePanel(model, text) {
  const body = el("div", { "aria-live": "polite" }, "Searching the training text …");
  const panel = el("section", { class: "provenance panel", "aria-label": "Where the reply comes from" }, body);
  search(model, text, body, panel);
  return panel;
}

async function search(model, text, body, panel) {
  for (;;) {
    try {
      const found = await post("/api/provenance", { model, text });
      const { top, bottom } = panel.getBoundingClientRect();
      show(body, found);
      if (bottom > 0 && top < innerHeight) reveal(panel); // unless it was scrolled away from while it searched
      return;
    } catch (err) {
      if (err.code !== "index_building") {
        replace(body, err.message);
        return;
      }
      replace(body, "The index of the training text is being built, once …");
      await new Promise((resolve) => setTimeout(resolve, 2000));
      if (!panel.isConnected) return;
    }
  }
}

function show(body, found) {
  replace(
    body,
    el("h3", {}, "Where this reply comes from"),
    el("p", { class: "verdict" }, found.verdict),
    found.problems ? el("p", { class: "hint" }, "Not all of the training text could be searched; niels-gpt research trace prints why.") : null,
    found.spans.length ? el("p", { class: "traced" }, marked(found)) : null,
    found.spans.map((span) =>
      el(
        "div",
        { class: "span" },
        el("h4", {}, `${plural(span.length, "character")}, found ${span.occurrences > 1 ? `${span.occurrences} times` : "once"}`),
        span.passages.map((passage) =>
          el("blockquote", {}, el("p", { class: "hint" }, `${passage.source}: ${passage.document}, byte ${passage.offset.toLocaleString("en")}`), el("p", { class: "passage" }, passage.before.trimStart(), el("mark", {}, passage.text), passage.after.trimEnd())),
        ),
      ),
    ),
    found.more_spans ? el("p", { class: "hint" }, `and ${plural(found.more_spans, "shorter overlap")}`) : null,
  );
}

// The text with every character that a span covers marked. Offsets count characters, not UTF-16 units.
function marked(found) {
  const characters = [...found.text];
  const inside = new Uint8Array(characters.length);
  for (const span of found.spans) inside.fill(1, span.start, span.end);
  const parts = [];
  for (let start = 0; start < characters.length; ) {
    let end = start + 1;
    while (end < characters.length && inside[end] === inside[start]) end++;
    const text = characters.slice(start, end).join("");
    parts.push(inside[start] ? el("mark", {}, text) : text);
    start = end;
  }
  return parts;
}
