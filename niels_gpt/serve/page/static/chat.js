import { el } from "./dom.js";

export function show(root) {
  root.append(el("h1", {}, "Chat"));
}

export function hide() {}
