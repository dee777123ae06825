// Chat: conversations, streaming replies, retry, edit, fork.

import { listModels } from "./api.js";
import { asBody, DEFAULTS, modelSelect, samplingControls } from "./controls.js";
import { button, el, field, replace, touched } from "./dom.js";
import { asJson, asMarkdown, download } from "./export.js";
import { generate, randomSeed, textOf } from "./generate.js";
import { guarded, notify } from "./notice.js";
import { newReply, ReplyView, setTokens } from "./reply.js";
import * as store from "./store.js";
import { hidePopover } from "./tokens.js";

let models = [];
let conversation = null;
let running = null; // the reply that streams: see reply()
let parts = null; // elements that change
let unwatch = null;
let draft = ""; // the message box while another view is shown
const RECORD_MS = 1000; // between two saves of a reply that streams
const wide = matchMedia("(min-width: 900px)"); // below it the panels are above the chat: style.css

export async function show(root) {
  parts = {
    conversations: el("ul", { class: "conversations" }),
    log: el("div", { class: "log", role: "log", "aria-label": "Conversation", tabindex: "0" }),
    settings: el("div", { onchange: guarded(() => { if (conversation.children.length) keep(); }) }),
    input: el("textarea", { rows: 3, value: draft, placeholder: "Write a message", "aria-label": "Message", "aria-describedby": "keys", onkeydown: typed }),
    send: button("Send", guarded(send), { class: "primary" }),
    stop: button("Stop", stop, { class: "primary", hidden: true }),
  };
  replace(
    root,
    el("h1", { class: "visually-hidden" }, "Chat"),
    el(
      "details",
      { class: "side panel", open: wide.matches },
      el("summary", {}, "Conversations"),
      button("New chat", guarded(startNew), { class: "wide" }),
      parts.conversations,
      el("div", { class: "row" }, button("Export Markdown", () => save("md"), { class: "small" }), button("Export JSON", () => save("json"), { class: "small" })),
    ),
    el(
      "section",
      { class: "middle", "aria-label": "Chat" },
      parts.log,
      el(
        "form",
        { class: "composer", onsubmit: (event) => event.preventDefault() },
        parts.input,
        el("div", { class: "row" }, el("p", { class: "hint", id: "keys" }, "Enter sends, Shift+Enter starts a line, Escape stops."), parts.send, parts.stop),
      ),
    ),
    el("details", { class: "side settings panel", open: wide.matches }, el("summary", {}, "Model and sampling"), parts.settings),
  );
  addEventListener("keydown", escape);
  wide.addEventListener("change", fold);
  unwatch = store.watch(changedElsewhere);
  render();
  if (wide.matches) parts.input.focus();
  await begin();
}

async function begin() {
  models = await listModels();
  if (!parts) return;
  open(conversation ?? store.load(store.list()[0]?.id) ?? store.create(chatModel(), { ...DEFAULTS }));
}

// The first model that was tuned on conversations, else the first one.
function chatModel() {
  return (models.find((model) => model.task === "sft") ?? models[0]).id;
}

export function hide() {
  stop();
  draft = parts.input.value;
  hidePopover(0);
  removeEventListener("keydown", escape);
  wide.removeEventListener("change", fold);
  unwatch();
  parts = null;
}

// A window that becomes narrow, or a phone that is turned, would show the open panels instead of the chat.
function fold() {
  for (const panel of document.querySelectorAll("details.side")) panel.open = wide.matches;
}

function open(chosen) {
  stop();
  conversation = chosen;
  if (!models.some((model) => model.id === conversation.model)) conversation.model = chatModel();
  render();
}

function startNew() {
  open(store.create(conversation?.model ?? chatModel(), { ...(conversation?.settings ?? DEFAULTS) }));
  parts.input.focus();
}

function changedElsewhere(id) {
  const stored = id === conversation?.id && !running && !parts.log.querySelector("textarea") && store.load(id);
  if (stored) open(stored);
  else renderList();
}

function keep() {
  store.save(conversation);
  renderList();
}

function remove(id) {
  if (running?.chat.id === id) running.deleted = true;
  store.remove(id);
}

// --- what is shown ---------------------------------------------------------------------------------

function render() {
  renderList();
  renderLog();
  if (!conversation) return;
  const system = el("textarea", { rows: 3, value: conversation.system, onchange: () => { conversation.system = system.value; } });
  replace(
    parts.settings,
    modelSelect(models, conversation.model, (id) => { conversation.model = id; }),
    field("System prompt", system),
    samplingControls(conversation.settings, (settings) => { conversation.settings = settings; }),
  );
}

function renderList() {
  replace(
    parts.conversations,
    store.list().map((entry) =>
      el(
        "li",
        {},
        button(entry.title, guarded(() => { const found = store.load(entry.id); if (found) open(found); }), { class: "quiet", "aria-current": entry.id === conversation?.id ? "true" : null }),
        button("×", guarded(() => { remove(entry.id); if (entry.id === conversation?.id) startNew(); else renderList(); }), { class: "quiet", "aria-label": `Delete ${entry.title}` }),
      ),
    ),
  );
}

function renderLog() {
  const shown = conversation ? store.path(conversation) : [];
  const focused = parts.log.contains(document.activeElement);
  replace(
    parts.log,
    shown.length ? null : el("p", { class: "empty hint" }, `Nothing is sent to any other machine: the model runs on the server that gave you this page. ${touched() ? "Tap" : "Point at"} a word of a reply to see how likely it was.`),
    shown.map(({ message, parent }) => messageNode(message, parent)),
  );
  if (focused) parts.log.focus(); // the element that had it is gone
  parts.log.scrollTop = parts.log.scrollHeight;
}

function messageNode(message, parent) {
  const name = message.role === "user" ? "You" : "Reply";
  const node = el("article", { class: `message ${message.role}`, "aria-label": name });
  const tools = [
    versions(message, parent),
    button("Edit", () => edit(node, message, parent), { class: "small quiet" }),
    // A message has no reply if the server failed.
    message.role === "assistant" || !message.children.length ? button("Retry", guarded(() => reply(message.role === "user" ? message : parent)), { class: "small quiet" }) : null,
  ];
  if (message.role === "user") return replace(node, el("div", { class: "text" }, message.content), el("div", { class: "row toolbar" }, tools));
  const view = new ReplyView({
    reply: message,
    prompt: { model: message.model, messages: store.messagesUpTo(conversation, parent) },
    model: models.find((model) => model.id === message.model),
    onFork: guarded((tokens, finished) => fork(parent, message, tokens, finished)),
    buttons: tools,
  });
  node.view = view;
  return replace(node, view.element);
}

function versions(message, parent) {
  const count = parent.children.length;
  if (count < 2) return null;
  const at = parent.children.indexOf(message);
  const go = (to) => guarded(() => { if (running) return; parent.at = to; keep(); renderLog(); });
  return el(
    "span",
    { class: "versions" },
    button("‹", go(at - 1), { class: "small quiet", disabled: at === 0, "aria-label": "Earlier version" }),
    `${at + 1} of ${count}`,
    button("›", go(at + 1), { class: "small quiet", disabled: at === count - 1, "aria-label": "Later version" }),
  );
}

function edit(node, message, parent) {
  if (running) return;
  const input = el("textarea", { rows: Math.min(12, message.content.split("\n").length + 1), value: message.content, "aria-label": "Edit the message" });
  const done = guarded(async () => {
    if (message.role === "user") {
      if (!input.value.trim()) throw new Error("the message is empty");
      await reply(store.add(parent, { role: "user", content: input.value }));
    } else {
      store.add(parent, { role: "assistant", content: input.value, ids: null, started: 0, model: message.model, seed: null, finished: null, seconds: 0 });
      keep();
      renderLog();
    }
  });
  input.addEventListener("keydown", (event) => {
    if (event.key === "Escape") renderLog();
    else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); done(); }
  });
  replace(node, input, el("div", { class: "row" }, button(message.role === "user" ? "Send" : "Save", done, { class: "small primary" }), button("Cancel", renderLog, { class: "small" })));
  input.focus();
}

function save(kind) {
  if (!conversation?.children.length) return notify("there is nothing to export yet");
  const name = (conversation.title || "conversation").replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").toLowerCase() || "conversation";
  if (kind === "md") download(`${name}.md`, asMarkdown(conversation), "text/markdown");
  else download(`${name}.json`, asJson(conversation), "application/json");
}

// --- what happens ----------------------------------------------------------------------------------

function typed(event) {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    guarded(send)();
  }
}

function escape(event) {
  if (event.key === "Escape" && running) stop();
}

function stop() {
  running?.controller.abort();
}

async function send() {
  const content = parts.input.value;
  if (running || !content.trim()) return;
  if (!conversation) await begin(); // the models were not listed yet, or that failed
  if (!parts || !parts.input.value) return; // the view was left, or the message was sent meanwhile
  const last = store.path(conversation).at(-1)?.message ?? conversation;
  parts.input.value = "";
  await reply(store.add(last, { role: "user", content }));
}

async function fork(parent, message, tokens, finished) {
  hidePopover(0);
  if (running) return;
  if (!finished) return reply(parent, tokens, message);
  const child = store.add(parent, newReply(message.model, message.seed, tokens));
  Object.assign(child, { content: textOf(tokens), finished: "stop", started: Math.min(message.started, tokens.length) });
  setTokens(child, tokens);
  keep();
  renderLog();
}

// Stream a reply to `parent`. A fork has the model and the seed of the reply that it comes from. The reply is saved
// while it streams, as one that was stopped, so that a reload or a crash of the tab loses at most a second of it.
async function reply(parent, start = [], origin = null) {
  if (running) return;
  const chat = conversation;
  const model = origin?.model ?? chat.model;
  const seed = origin?.seed ?? chat.settings.seed ?? randomSeed();
  const prompt = { model, messages: store.messagesUpTo(chat, parent) };
  const message = store.add(parent, { ...newReply(model, seed, start), finished: "aborted" });
  const tokens = [...start];
  const began = performance.now();
  const job = { chat, controller: new AbortController(), deleted: false };
  let result = null;
  let recorded = 0;
  const record = () => {
    recorded = performance.now();
    setTokens(message, [...tokens]);
    Object.assign(message, { content: textOf(tokens), seconds: (recorded - began) / 1000 });
    try {
      if (!job.deleted) store.save(chat);
    } catch (err) {
      notify(err.message); // the reply goes on
    }
  };
  const leave = () => { record(); job.controller.abort(); };
  running = job;
  record();
  addEventListener("pagehide", leave);
  renderList();
  renderLog();
  const view = parts.log.lastElementChild.view;
  busy(true);
  view.live(true);
  try {
    result = await generate(prompt, asBody(chat.settings, seed), start, (more) => {
      tokens.push(...more);
      view.push(more);
      follow();
      if (performance.now() - recorded > RECORD_MS) record();
    }, job.controller.signal);
    setTokens(message, result.tokens);
    Object.assign(message, { content: textOf(result.tokens), finished: result.finished, seconds: result.seconds });
    if (result.error) throw result.error;
  } catch (err) {
    if (!result) { // it failed before the first token
      parent.children.splice(parent.children.indexOf(message), 1);
      parent.at = Math.max(0, parent.children.length - 1);
    }
    throw err;
  } finally {
    running = null;
    removeEventListener("pagehide", leave);
    if (!job.deleted) store.save(chat);
    if (parts) {
      busy(false);
      renderList();
      if (chat === conversation) {
        view.live(false);
        if (!parent.children.includes(message)) renderLog();
        else follow();
      }
    }
  }
}

function busy(on) {
  parts.send.hidden = on;
  parts.stop.hidden = !on;
}

// Scroll with the reply, unless the reader has scrolled up.
function follow() {
  const { log } = parts ?? {};
  if (log && log.scrollHeight - log.scrollTop - log.clientHeight < 120) log.scrollTop = log.scrollHeight;
}
