// Compare: two models, one prompt, one seed, side by side.

import { listModels } from "./api.js";
import { asBody, DEFAULTS, modelSelect, samplingControls } from "./controls.js";
import { button, el, field, replace } from "./dom.js";
import { generate, randomSeed, textOf } from "./generate.js";
import { guarded } from "./notice.js";
import { newReply, ReplyView, setTokens } from "./reply.js";
import { hidePopover } from "./tokens.js";

const state = { prompt: "", kind: "message", settings: { ...DEFAULTS }, sides: [{ model: null }, { model: null }] };
let running = null;
let parts = null;

export async function show(root) {
  const models = await listModels();
  state.models = models;
  state.sides.forEach((side, i) => { side.model ??= models[Math.min(i, models.length - 1)].id; });
  const input = el("textarea", {
    rows: 3, value: state.prompt, placeholder: "One prompt for both models",
    oninput: () => { state.prompt = input.value; },
    onkeydown: (event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); run(); } },
  });
  const kind = el(
    "select",
    { onchange: () => { state.kind = kind.value; } },
    el("option", { value: "message", selected: state.kind === "message" }, "A message: both reply"),
    el("option", { value: "text", selected: state.kind === "text" }, "A text: both continue it"),
  );
  const run = guarded(compare);
  parts = {
    columns: state.sides.map(() => el("div", { class: "result", role: "log", "aria-label": "Reply" })),
    run: button("Compare", run, { class: "primary" }),
    stop: button("Stop", () => running?.abort(), { class: "primary", hidden: true }),
  };
  replace(
    root,
    el("h1", {}, "Compare two models"),
    el(
      "div",
      { class: "compare-form panel" },
      field("Prompt", input),
      field("The prompt is", kind),
      el("details", {}, el("summary", {}, "Sampling"), samplingControls(state.settings, (settings) => { state.settings = settings; })),
      el("div", { class: "row" }, parts.run, parts.stop, el("p", { class: "hint" }, "Both get the same seed, so that they draw the same random numbers.")),
    ),
    el(
      "div",
      { class: "columns" },
      state.sides.map((side, i) =>
        el(
          "section",
          { class: "column panel", "aria-label": i ? "Right" : "Left" },
          modelSelect(models, side.model, (id) => { side.model = id; }, i ? "Right model" : "Left model"),
          parts.columns[i],
        ),
      ),
    ),
  );
  addEventListener("keydown", escape);
  state.sides.forEach((side, i) => { if (side.reply) showReply(i); });
}

export function hide() {
  running?.abort();
  hidePopover(0);
  removeEventListener("keydown", escape);
  parts = null;
}

function escape(event) {
  if (event.key === "Escape") running?.abort();
}

function promptOf(model) {
  return state.kind === "text" ? { model, text: state.prompt } : { model, messages: [{ role: "user", content: state.prompt }] };
}

async function compare() {
  if (running || !state.prompt.trim()) return;
  const seed = state.settings.seed ?? randomSeed();
  await stream(state.sides.map((side, i) => () => one(i, promptOf(side.model), seed, [])));
}

async function stream(runs) {
  running = new AbortController();
  busy(true);
  try {
    const results = await Promise.allSettled(runs.map((run) => run()));
    const failed = results.find((result) => result.status === "rejected");
    if (failed) throw failed.reason;
  } finally {
    running = null;
    if (parts) busy(false);
  }
}

async function one(i, prompt, seed, start) {
  const side = state.sides[i];
  side.reply = newReply(prompt.model, seed, start);
  side.prompt = prompt;
  const view = showReply(i);
  view.live(true);
  view.push(start);
  try {
    const result = await generate(prompt, asBody(state.settings, seed), start, (tokens) => view.push(tokens), running.signal);
    setTokens(side.reply, result.tokens);
    Object.assign(side.reply, { content: textOf(result.tokens), finished: result.finished, seconds: result.seconds });
    if (result.error) throw result.error;
  } finally {
    view.live(false);
  }
}

function showReply(i) {
  const side = state.sides[i];
  const view = new ReplyView({
    reply: side.reply,
    prompt: side.prompt,
    model: state.models.find((model) => model.id === side.reply.model),
    onFork: guarded(async (tokens, finished) => {
      hidePopover(0);
      if (running) return;
      const { reply, prompt } = side;
      if (!finished) return stream([() => one(i, prompt, reply.seed, tokens)]);
      side.reply = { ...newReply(reply.model, reply.seed, tokens), content: textOf(tokens), finished: "stop" };
      setTokens(side.reply, tokens);
      showReply(i);
    }),
  });
  if (parts) replace(parts.columns[i], view.element);
  return view;
}

function busy(on) {
  parts.run.hidden = on;
  parts.stop.hidden = !on;
}
