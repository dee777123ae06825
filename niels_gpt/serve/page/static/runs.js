// The view Runs: the list of runs, or one of them (#/runs/NAME).

import { get } from "./api.js";
import { shortNumber } from "./charts.js";
import { el, replace } from "./dom.js";
import { poll } from "./poll.js";
import { RunView } from "./run.js";
import { progress, stateBadge, whenText } from "./run_parts.js";

let leave = null;

export function show(root, params) {
  hide();
  if (params[0]) {
    const view = new RunView(root, params[0]);
    leave = () => view.close();
  } else leave = showList(root);
}

export function hide() {
  leave?.();
  leave = null;
}

function showList(root) {
  const about = el("p", { class: "hint" }, "Loading …");
  const body = el("div", {});
  root.append(el("h1", {}, "Runs"), about, body);
  let before = "";
  let open = true;
  const stop = poll(async () => {
    const found = await get("/api/runs");
    if (!open) return false;
    const now = JSON.stringify(found);
    const training = found.runs.filter((run) => run.state === "training").length;
    if (now !== before) {
      about.textContent = summary(found, training);
      replaceKeepingFocus(body, found.runs.length ? listTable(found.runs) : emptyList());
    }
    const changed = now !== before;
    before = now;
    return changed || training > 0;
  });
  return () => {
    open = false;
    stop();
  };
}

function summary({ folder, runs }, training) {
  const number = `${runs.length} ${runs.length === 1 ? "run" : "runs"} in ${folder}`;
  return training ? `${number}, ${training} training now.` : `${number}.`;
}

function emptyList() {
  return el(
    "div", { class: "panel" },
    el("p", {}, "There are no runs yet. ", el("code", {}, "niels-gpt notes FOLDER"), ", ", el("code", {}, "niels-gpt demo"), " or ", el("code", {}, "niels-gpt train"), " makes one; it appears here when it starts."),
  );
}

// The roles are explicit because the phone layout changes `display`, with which tables lose them.
function listTable(runs) {
  const columns = ["Run", "State", "Progress", "Best loss", "Bits/byte", "Weights", "Changed"];
  return el(
    "table", { class: "runs", role: "table" }, el("caption", { class: "visually-hidden" }, "Runs, newest first"),
    el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, columns.map((name) => el("th", { scope: "col", role: "columnheader" }, name)))),
    el("tbody", { role: "rowgroup" }, runs.map((run) => el(
      "tr", { role: "row", "data-run": run.id },
      el("th", { scope: "row", role: "rowheader" }, el("a", { href: `#/runs/${encodeURIComponent(run.name)}` }, run.name), run.task && el("span", { class: "hint" }, ` ${run.task}`)),
      cell(columns[1], stateBadge(run.state), run.problem && el("p", { class: "hint problem" }, run.problem)),
      cell(columns[2], run.steps == null ? "–" : progress(run)),
      cell(columns[3], shortNumber(run.best_loss)),
      cell(columns[4], shortNumber(run.bits_per_byte)),
      cell(columns[5], shortNumber(run.parameters)),
      cell(columns[6], whenText(run.changed)),
    ))),
  );
}

function cell(label, ...children) {
  return el("td", { role: "cell", "data-label": label, class: children[0] === "–" && "unknown" }, ...children);
}

// Replace the list; a link that had the focus has it again.
function replaceKeepingFocus(body, node) {
  const focused = body.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  replace(body, node);
  if (focused) [...body.querySelectorAll("a")].find((link) => link.getAttribute("href") === focused)?.focus();
}
