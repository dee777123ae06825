// Parts that the list of runs and the view of one run share.

import { el } from "./dom.js";

const SIGNS = { training: "▶", finished: "✓", stopped: "■", imported: "↓", failed: "✕" };

export function stateBadge(state) {
  return el("span", { class: `state ${state}` }, el("span", { "aria-hidden": "true" }, `${SIGNS[state] ?? ""} `), state);
}

export function progress(run) {
  const said = `${count(run.steps)} of ${count(run.total_steps)} steps`;
  return el(
    "span", { class: "progress" },
    el("progress", { max: run.total_steps || 1, value: Math.min(run.steps ?? 0, run.total_steps || 1), "aria-label": said }),
    el("span", {}, said),
  );
}

export function count(number) {
  return number == null ? "–" : number.toLocaleString("en-US");
}

export function percent(p) {
  if (p == null) return "–";
  if (p === 0 || p >= 0.001) return `${Number((100 * p).toPrecision(3))} %`;
  return `${(100 * p).toExponential(1)} %`;
}

export function whenText(seconds) {
  const date = new Date(1000 * seconds);
  const pad = (number) => String(number).padStart(2, "0");
  return `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())} ${pad(date.getHours())}:${pad(date.getMinutes())}`;
}

export function duration(seconds) {
  if (seconds < 90) return `${Math.max(1, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${Number((seconds / 3600).toPrecision(2))} h`;
}
