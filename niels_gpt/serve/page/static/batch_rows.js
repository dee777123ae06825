// The rows of a training step: what the model learned from there.

import { get } from "./api.js";
import { button, el, field } from "./dom.js";
import { guarded } from "./notice.js";
import { count } from "./run_parts.js";

// newest(): the last step of the run.
export function batchRows(id, newest) {
  const step = el("input", { type: "number", min: 0, step: 1, value: 0, required: true });
  const about = el("p", { class: "hint", role: "status" });
  const rows = el("div", { class: "rows" });
  const more = button("More rows", guarded(() => load(loaded)), { class: "small", hidden: true });
  let loaded = 0;
  let asked = 0;

  async function load(first) {
    const number = ++asked;
    const wanted = Number(step.value);
    if (!first) about.textContent = "Reading the data of the run …";
    let found;
    try {
      found = await get(`/api/runs/${id}/batches/${wanted}?first=${first}`);
    } catch (err) {
      if (number === asked) about.textContent = err.message;
      return;
    }
    if (number !== asked) return;
    if (!first) rows.replaceChildren();
    loaded = first + found.rows.length;
    const past = found.step >= found.total_steps ? " (past the end of the run)" : "";
    about.textContent = `Step ${count(found.step)} of ${count(found.total_steps)}${past}: ${loaded} of ${count(found.total)} rows of ${found.context} ${found.unit}.`;
    rows.append(...found.rows.map(row));
    more.hidden = loaded >= found.total;
  }

  const go = (value) => {
    step.value = Math.max(0, value);
    return load(0);
  };
  const form = el(
    "form", { class: "row controls", onsubmit: guarded((event) => { event.preventDefault(); return load(0); }) }, field("Training step, from 0", step),
    el("button", { type: "submit", class: "primary" }, "Show rows"), button("Earlier", guarded(() => go(Number(step.value) - 1))),
    button("Later", guarded(() => go(Number(step.value) + 1))), button("Newest", guarded(() => go(newest()))),
  );
  const node = el("div", {}, form, about, rows, more);
  const show = guarded(async (wanted) => {
    await go(wanted);
    node.scrollIntoView({ block: "start" });
    step.focus({ preventScroll: true });
  });
  return { node, show };
}

function row(found) {
  return el(
    "article", { class: "batch-row" },
    el("h3", {}, `Row ${found.row}: `, el("b", {}, found.source)),
    el("p", { class: "hint" }, `${found.document}, offset ${count(found.offset)}`),
    el("pre", { class: "text", dir: "auto", tabindex: "0", role: "region", "aria-label": `Text of row ${found.row}` }, found.text, !found.complete && " … (cut off)"),
  );
}
