// A conversation as a file.

import { el } from "./dom.js";
import { path } from "./store.js";

const NAMES = { user: "You", assistant: "Reply" };

export function asMarkdown(conversation) {
  const parts = [`# ${conversation.title || "Conversation"}`];
  if (conversation.system.trim()) parts.push(`## System\n\n${conversation.system.trim()}`);
  for (const { message } of path(conversation)) {
    const origin = message.ids ? ` (${message.model}, seed ${message.seed})` : message.model ? " (edited by hand)" : "";
    parts.push(`## ${NAMES[message.role]}${origin}\n\n${message.content}`);
  }
  return `${parts.join("\n\n")}\n`;
}

// With all versions of every message, and the ids of the tokens.
export function asJson(conversation) {
  return `${JSON.stringify({ format: "niels-gpt conversation", version: 1, ...conversation }, null, 1)}\n`;
}

export function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
