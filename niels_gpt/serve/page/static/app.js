// The shell: views by location.hash (#/chat, #/compare, #/runs, #/runs/NAME), theme, one line for errors.
// A view is a module with show(root, params) and hide(); params are the parts of the hash after its name. The chat is
// loaded with the page, the others when they are first opened: half as many files until the page takes input.

import * as chat from "./chat.js";
import { notify } from "./notice.js";

const VIEWS = {
  chat: async () => chat,
  compare: () => import("./compare.js"),
  runs: () => import("./runs.js"),
};
const THEMES = ["auto", "light", "dark"];
const THEME = "niels-gpt-theme";
const root = document.getElementById("view");
let shown = null; // the module of the view on the page
let opened = 0;

async function route() {
  const number = ++opened;
  const [name = "", ...params] = location.hash.replace(/^#\/?/, "").split("/").map(decode);
  const view = VIEWS[name] ? name : "chat";
  shown?.hide();
  shown = null;
  notify("");
  root.replaceChildren();
  scrollTo(0, 0);
  root.className = `view view-${view}`;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#/${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${view[0].toUpperCase()}${view.slice(1)} · niels-gpt`;
  try {
    const module = await VIEWS[view]();
    if (number !== opened) return; // another view was chosen while this one was loading
    shown = module;
    const complete = module.show(root, params);
    performance.mark("interactive"); // it takes input; its data may still be on the way
    await complete;
  } catch (err) {
    if (number === opened) notify(err.message);
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
