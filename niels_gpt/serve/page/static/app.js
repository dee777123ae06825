// The shell: views by location.hash (#/chat, #/compare, #/runs, #/runs/NAME), theme, one line for errors.
// A view is a module with show(root, params) and hide(); params are the parts of the hash after its name.

import * as chat from "./chat.js";
import * as compare from "./compare.js";
import * as runs from "./runs.js";
import { notify } from "./notice.js";

const VIEWS = { chat, compare, runs };
const THEMES = ["auto", "light", "dark"];
const THEME = "niels-gpt-theme";
const root = document.getElementById("view");
let shown = null;

async function route() {
  const [name = "", ...params] = location.hash.replace(/^#\/?/, "").split("/").map(decode);
  const view = VIEWS[name] ? name : "chat";
  if (shown) VIEWS[shown].hide();
  shown = view;
  notify("");
  root.replaceChildren();
  root.className = `view view-${view}`;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#/${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${view[0].toUpperCase()}${view.slice(1)} · niels-gpt`;
  try {
    await VIEWS[view].show(root, params);
  } catch (err) {
    notify(err.message);
  }
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function theme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  const button = document.getElementById("theme");
  button.textContent = `Theme: ${name}`;
  button.onclick = () => {
    const next = THEMES[(THEMES.indexOf(name) + 1) % THEMES.length];
    localStorage.setItem(THEME, next);
    theme(next);
  };
}

const stored = localStorage.getItem(THEME);
theme(THEMES.includes(stored) ? stored : "auto");
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  root.focus();
});
addEventListener("hashchange", route);
route();
performance.mark("interactive"); // the first view takes input; its data may still be on the way
