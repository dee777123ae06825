import { el } from "./dom.js";

export function show(root) {
  root.append(el("h1", {}, "Compare"));
}

export function hide() {}
