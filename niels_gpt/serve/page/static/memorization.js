// The memorization reports of a run: the result in words, a table of documents, and their texts by P(z).

import { get } from "./api.js";
import { shortNumber, svg } from "./charts.js";
import { button, el, replace } from "./dom.js";
import { guarded } from "./notice.js";
import { percent } from "./run_parts.js";

const MARKED = 4;

export async function showReports(run, node) {
  const { levels, reports } = await get(`/api/runs/${run}/reports`);
  if (!reports.length) {
    replace(node, el("p", { class: "hint" }, "Not measured yet: ", el("code", {}, "niels-gpt research memorize"), " writes a report into the run."));
    return;
  }
  replace(node, reports.map((report) => showReport(run, report, levels)));
}

function showReport(run, report, levels) {
  if (report.problem) return el("p", { class: "problem" }, report.problem);
  const { window: size, prompt } = report.settings;
  return el(
    "article", {},
    el("h3", {}, `${report.title} (${report.folder}, after ${report.step.toLocaleString("en-US")} steps)`),
    report.headline.map((line) => el("p", {}, line)),
    el("p", { class: "hint" }, `P(z) is the probability that the model continues a true prompt of ${prompt} ${report.unit}s word for word up to ${size} ${report.unit}s.`),
    documentsTable(report), heatKey(levels), report.strips.map((strip, i) => showStrip(run, report.id, strip, i)),
  );
}

function documentsTable(report) {
  const names = ["Document", "Windows", "Mean P(z)", "Highest P(z)", "Windows from 50 %", "Nats"];
  return el(
    "details", {}, el("summary", {}, `${report.documents.length} documents as a table`),
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Documents" }, el(
      "table", {}, el("thead", {}, el("tr", {}, names.map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, report.documents.map((d) => el(
        "tr", {}, el("th", { scope: "row" }, d.name, d.control && " (control)"),
        [d.windows.toLocaleString("en-US"), percent(d.mean_p), percent(d.max_p), d.memorized.toLocaleString("en-US"), shortNumber(d.nats_per_token)].map((value) => el("td", {}, value)),
      ))),
    )),
  );
}

function heatKey(levels) {
  return el("ul", { class: "heat-key", "aria-label": "Colors by P(z)" }, levels.map((name, i) => el("li", {}, el("span", { class: `box h${i}`, "aria-hidden": "true" }), name)));
}

function showStrip(run, report, strip, number) {
  const text = el("div", { class: "text strip-text", dir: "auto", tabindex: "0", role: "region", "aria-label": `Text of ${strip.document} by P(z)` });
  const more = button("More text", guarded(() => load()), { class: "small", hidden: true });
  let end = 0;
  async function load() {
    const found = await get(`/api/runs/${run}/reports/${report}/strips/${number}?start=${end}`);
    if (found.start !== end) return;
    end = found.end;
    text.append(...found.spans.map(([piece, level, low, high]) => el(level >= MARKED ? "mark" : "span", { class: `h${level}`, title: low === high ? percent(low) : `${percent(low)} to ${percent(high)}` }, piece)));
    more.hidden = end >= found.total;
  }
  const opened = guarded(async (event) => {
    if (event.target.open && !end) await load();
  });
  return el(
    "details", { class: "strip", ontoggle: opened },
    el("summary", {}, el("b", {}, strip.document), el("span", { class: "hint" }, ` ${strip.control ? "control, " : ""}${strip.characters.toLocaleString("en-US")} characters`), bar(strip.bar)),
    text, more,
  );
}

function bar(levels) {
  const drawn = svg("svg", { class: "bar", viewBox: `0 0 ${levels.length || 1} 1`, preserveAspectRatio: "none", "aria-hidden": "true" });
  for (let start = 0; start < levels.length; ) {
    let end = start + 1;
    while (end < levels.length && levels[end] === levels[start]) end++;
    drawn.append(svg("rect", { class: `h${levels[start]}`, x: start, y: 0, width: end - start, height: 1 }));
    start = end;
  }
  return drawn;
}
