// The controls that Chat and Compare share: which model, and how to sample.

import { el, field } from "./dom.js";
import { plural } from "./format.js";

export const DEFAULTS = { temperature: 0.3, top_k: 50, top_p: 1, min_p: 0, max_tokens: 256, seed: null };

export function modelSelect(models, selected, onChange, label = "Model") {
  const select = el(
    "select",
    { onchange: () => onChange(select.value) },
    models.map((model) => el("option", { value: model.id, selected: model.id === selected }, model.id)),
  );
  const facts = el("p", { class: "hint" });
  const describe = () => {
    const model = models.find((each) => each.id === select.value);
    facts.textContent = model ? describeModel(model) : "";
  };
  select.addEventListener("change", describe);
  describe();
  return el("div", { class: "model" }, field(label, select), facts);
}

function describeModel(model) {
  const size = model.parameters >= 1e6 ? `${(model.parameters / 1e6).toFixed(1)} M` : `${Math.round(model.parameters / 1e3)} k`;
  return `${size} weights, ${plural(model.layers, "layer")}, ${plural(model.heads, "head")}, ${model.context_length} ${model.tokens} of context, step ${model.training_steps.toLocaleString("en")}`;
}

// Returns the fields; onChange gets the new settings.
export function samplingControls(settings, onChange) {
  const values = { ...DEFAULTS, ...settings };
  const change = (name, value) => {
    values[name] = value;
    onChange({ ...values });
  };
  return el(
    "div",
    { class: "sampling" },
    slider("Temperature", "0 always takes the most likely token", values.temperature, 0, 2, 0.05, (v) => change("temperature", v)),
    number("Top-k", "empty: all tokens", values.top_k, 1, 1e6, (v) => change("top_k", v)),
    slider("Top-p", "", values.top_p, 0.05, 1, 0.05, (v) => change("top_p", v)),
    slider("Min-p", "", values.min_p, 0, 1, 0.01, (v) => change("min_p", v)),
    number("Longest reply, in tokens", "", values.max_tokens, 1, 1e6, (v) => change("max_tokens", v ?? DEFAULTS.max_tokens)),
    number("Seed", "empty: a new one for each reply", values.seed, 0, Number.MAX_SAFE_INTEGER, (v) => change("seed", v)),
  );
}

// The settings as a body of /api/reply, with this seed.
export function asBody(settings, seed) {
  const { temperature, top_k, top_p, min_p, max_tokens } = { ...DEFAULTS, ...settings };
  return { temperature, top_k, top_p, min_p: min_p || null, max_tokens, seed };
}

function slider(label, hint, value, min, max, step, onValue) {
  const shown = el("output", {}, String(value));
  const input = el("input", {
    type: "range", min, max, step, value: String(value),
    oninput: () => {
      shown.textContent = input.value;
      onValue(Number(input.value));
    },
  });
  const node = field(label, input, hint);
  node.firstChild.append(" ", shown);
  return node;
}

function number(label, hint, value, min, max, onValue) {
  const input = el("input", {
    type: "number", min, max, step: 1, value: value == null ? "" : String(value), inputmode: "numeric",
    onchange: () => {
      const given = input.value === "" ? null : Math.min(max, Math.max(min, Math.trunc(Number(input.value))));
      input.value = given == null ? "" : String(given);
      onValue(given);
    },
  });
  return field(label, input, hint);
}
