// Conversations, kept in this browser. A conversation is a tree: every message has `children`, and `at` says which one
// is shown. A retry, an edit and a fork add a child, so that nothing is lost.

const LIST = "niels-gpt-conversations";
const ONE = "niels-gpt-conversation-";

export function list() {
  try {
    const found = JSON.parse(localStorage.getItem(LIST) ?? "[]");
    return Array.isArray(found) ? found : [];
  } catch {
    return [];
  }
}

export function create(model, settings) {
  return { id: freshId(), title: "", created: new Date().toISOString(), model, system: "", settings, children: [], at: 0 };
}

// crypto.randomUUID exists only in a secure context: https or localhost.
function freshId() {
  return Array.from(crypto.getRandomValues(new Uint32Array(4)), (part) => part.toString(16).padStart(8, "0")).join("");
}

// Call onChange(id) when another tab has saved or deleted a conversation; returns a function that ends this.
export function watch(onChange) {
  const changed = ({ key }) => { if (key?.startsWith(ONE)) onChange(key.slice(ONE.length)); };
  addEventListener("storage", changed);
  return () => removeEventListener("storage", changed);
}

export function load(id) {
  try {
    return JSON.parse(localStorage.getItem(ONE + id));
  } catch {
    return null;
  }
}

// Throws an Error with one line if the storage is full. What another tab has saved in the meantime stays: then this
// conversation gets a new id.
export function save(conversation) {
  const stored = load(conversation.id);
  if (stored && stored.saved !== conversation.saved) conversation.id = freshId();
  conversation.saved = freshId();
  conversation.title = (path(conversation)[0]?.message.content ?? "").trim().replace(/\s+/g, " ").slice(0, 60) || "New chat";
  const others = list().filter((entry) => entry.id !== conversation.id);
  try {
    localStorage.setItem(ONE + conversation.id, JSON.stringify(conversation));
    localStorage.setItem(LIST, JSON.stringify([{ id: conversation.id, title: conversation.title }, ...others]));
  } catch {
    throw new Error("this conversation is not kept: the browser's storage is full; delete older conversations");
  }
}

export function remove(id) {
  localStorage.removeItem(ONE + id);
  localStorage.setItem(LIST, JSON.stringify(list().filter((entry) => entry.id !== id)));
}

// The messages that are shown, each with its parent.
export function path(conversation) {
  const found = [];
  for (let parent = conversation; parent.children?.length; ) {
    const message = parent.children[Math.min(parent.at, parent.children.length - 1)];
    found.push({ message, parent });
    parent = message;
  }
  return found;
}

export function add(parent, message) {
  const child = { ...message, children: [], at: 0 };
  parent.children.push(child);
  parent.at = parent.children.length - 1;
  return child;
}

// What the model is given to reply to `parent`: the system prompt and the messages up to it.
export function messagesUpTo(conversation, parent) {
  const messages = conversation.system.trim() ? [{ role: "system", content: conversation.system }] : [];
  if (parent === conversation) return messages;
  for (const { message } of path(conversation)) {
    messages.push({ role: message.role, content: message.content });
    if (message === parent) break;
  }
  return messages;
}
