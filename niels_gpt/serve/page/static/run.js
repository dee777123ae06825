// One run: state, curves that grow while it trains, samples, memorization, batch rows, config.

import { get } from "./api.js";
import { batchRows } from "./batch_rows.js";
import { LineChart, shortNumber, smooth } from "./charts.js";
import { button, el, field, freshId, replace } from "./dom.js";
import { showReports } from "./memorization.js";
import { guarded } from "./notice.js";
import { poll } from "./poll.js";
import { count, duration, progress, stateBadge } from "./run_parts.js";

const SKIPPED = 0.05;
const LEAST_STEPS = 100;

export class RunView {
  constructor(root, name) {
    this.name = name;
    this.metrics = new Metrics();
    this.smoothing = 0.6;
    this.scale = "linear";
    this.skip = true;
    this.closed = false;
    this.title = el("h1", {}, name);
    this.status = el("div", { class: "row facts" }, "Loading …");
    this.state = el("span", { role: "status" });
    this.charts = {
      loss: new LineChart({ title: "Loss", xLabel: "step", yLabel: "loss (nats)", pickLabel: "Rows of this step", onPick: (step) => this.batch.show(step) }),
      lr: new LineChart({ title: "Learning rate", xLabel: "step", yLabel: "learning rate" }),
      speed: new LineChart({ title: "Speed", xLabel: "step", yLabel: "tokens/s" }),
    };
    this.samples = el("div", {}, el("p", { class: "hint" }, "No sample is written yet."));
    this.reports = el("div", {});
    this.config = el("div", {});
    this.rest = el("div", { class: "stack", hidden: true });
    root.append(
      el("nav", { "aria-label": "Breadcrumb" }, el("a", { href: "#/runs" }, "← All runs")),
      el("div", { class: "row heading" }, this.title, this.state), this.status, this.rest,
    );
    this.stop = poll(() => this.refresh());
  }

  close() {
    this.closed = true;
    this.stop();
    for (const chart of Object.values(this.charts)) chart.close();
  }

  async refresh() {
    if (!this.id && !(await this.find())) return false;
    const answer = await get(`/api/runs/${this.id}/metrics?${this.metrics.query()}`);
    if (this.closed) return false;
    const changed = this.metrics.add(answer);
    this.showState(answer);
    if (changed) this.draw();
    if (answer.newest_sample !== this.newest) {
      this.newest = answer.newest_sample;
      await this.loadSamples();
    }
    if (answer.state !== this.before) {
      this.before = answer.state;
      await this.loadDetails();
    }
    return changed || answer.state === "training";
  }

  // Look the name up in the list: the id is what requests contain.
  async find() {
    const { runs } = await get("/api/runs");
    if (this.closed) return false;
    const run = runs.find((one) => one.name === this.name || one.id === this.name);
    if (!run) {
      replace(this.status, `There is no run ${this.name}.`);
      return false;
    }
    this.id = run.id;
    this.title.textContent = run.name;
    document.title = `${run.name} · niels-gpt`;
    this.batch = batchRows(run.id, () => this.metrics.last);
    this.rest.append(
      el("section", { class: "panel", "aria-label": "Curves" }, this.controls(), this.charts.loss.node, el("div", { class: "two" }, this.charts.lr.node, this.charts.speed.node)),
      section("Samples", this.samples), section("Memorization", this.reports), section("Batch rows", this.batch.node), section("Config", this.config),
    );
    this.rest.hidden = false;
    return true;
  }

  controls() {
    const scale = el("select", { onchange: (event) => this.set("scale", event.target.value) }, el("option", { value: "linear" }, "linear"), el("option", { value: "log" }, "logarithmic"));
    const amount = el("output", {}, this.smoothing.toFixed(2));
    const slider = el("input", {
      type: "range", min: 0, max: 0.99, step: 0.01, value: this.smoothing,
      oninput: (event) => {
        amount.textContent = Number(event.target.value).toFixed(2);
        this.set("smoothing", Number(event.target.value));
      },
    });
    const skip = el("input", { type: "checkbox", id: freshId("skip"), checked: this.skip, onchange: (event) => this.set("skip", event.target.checked) });
    const smoothing = field("Smoothing", slider);
    smoothing.append(amount);
    return el("div", { class: "row controls" }, field("Loss axis", scale), smoothing, el("div", { class: "row" }, skip, el("label", { for: skip.id }, "Cut off the first fall")));
  }

  set(name, value) {
    this[name] = value;
    this.draw();
  }

  showState(run) {
    const now = performance.now() / 1000;
    if (run.state !== "training") this.started = null;
    else this.started ??= { at: now, steps: run.steps };
    const rate = this.started && now > this.started.at + 1 ? (run.steps - this.started.steps) / (now - this.started.at) : 0;
    const left = rate > 0 && run.total_steps > run.steps ? `about ${duration((run.total_steps - run.steps) / rate)} left` : null;
    if (this.state.dataset.state !== run.state) {
      this.state.dataset.state = run.state;
      replace(this.state, stateBadge(run.state));
    }
    const last = this.metrics.newest();
    replace(
      this.status, run.problem && el("p", { class: "problem" }, run.problem), run.steps != null && progress(run), left && el("span", {}, left),
      fact("loss", last.loss), fact("best", run.best_loss), fact("bits/byte", run.bits_per_byte),
      fact("tokens/s", run.state === "training" ? last.tokens_per_s : null), run.parameters != null && el("span", {}, `${shortNumber(run.parameters)} weights`), run.task && el("span", {}, run.task),
    );
  }

  draw() {
    const { points, evals, width } = this.metrics;
    const smoothed = smooth(points.loss, this.smoothing);
    const each = this.smoothing > 0 ? [{ key: "each", companion: "train", name: "each step", x: points.step, y: points.loss, low: width > 1 ? points.low : null, high: width > 1 ? points.high : null, faint: true }] : [];
    const held = Object.entries(evals).map(([name, line], i) => ({ key: name, name, x: line.step, y: line.loss, dots: true, color: i + 1, dash: i }));
    const train = { key: "train", name: this.smoothing > 0 ? "training, smoothed" : "training", x: points.step, y: smoothed };
    const series = [...each, train, ...held];
    this.charts.loss.update({ series, log: this.scale === "log", range: this.skip ? lateRange(series, this.metrics.last) : null });
    this.charts.lr.update({ series: [{ key: "lr", name: "learning rate", x: points.step, y: points.lr }] });
    const rates = points.tokens_per_s;
    this.charts.speed.update({
      series: [
        ...(this.smoothing > 0 ? [{ key: "each", companion: "speed", name: "each step", x: points.step, y: rates, color: 2, faint: true }] : []),
        { key: "speed", name: "tokens/s", x: points.step, y: smooth(rates, this.smoothing), color: 2 },
      ],
      range: [0, Math.max(1, ...rates.filter((rate) => rate != null))],
    });
  }

  async loadSamples() {
    const { steps } = await get(`/api/runs/${this.id}/samples`);
    if (this.closed || !steps.length) return;
    const followed = !this.sample || this.sample.index === this.sample.steps.length - 1;
    this.sample ??= this.sampleControls();
    this.sample.steps = steps;
    this.sample.slider.max = steps.length - 1;
    if (followed) await this.showSample(steps.length - 1);
    else this.sample.slider.value = this.sample.index;
  }

  sampleControls() {
    const label = el("output", {});
    const text = el("pre", { class: "text", dir: "auto", tabindex: "0", role: "region", "aria-label": "Text of the sample" });
    const slider = el("input", { type: "range", min: 0, max: 0, value: 0, oninput: guarded((event) => this.showSample(Number(event.target.value))) });
    const move = (by) => guarded(() => this.showSample(Math.min(Math.max(this.sample.index + by, 0), this.sample.steps.length - 1)));
    const chosen = field("Sample over time", slider);
    replace(this.samples, el("div", { class: "row controls" }, button("Earlier", move(-1), { class: "small" }), chosen, button("Later", move(1), { class: "small" }), label), text);
    return { steps: [], index: -1, slider, label, text, cache: new Map() };
  }

  async showSample(index) {
    const sample = this.sample;
    const step = sample.steps[index];
    sample.index = index;
    sample.slider.value = index;
    sample.slider.setAttribute("aria-valuetext", `after ${count(step)} steps`);
    sample.label.textContent = `after ${count(step)} steps, ${index + 1} of ${sample.steps.length}`;
    if (!sample.cache.has(step)) sample.cache.set(step, await get(`/api/runs/${this.id}/samples/${step}`));
    const { text, complete } = sample.cache.get(step);
    if (sample.index === index) sample.text.textContent = complete ? text : `${text} … (cut off)`;
  }

  async loadDetails() {
    const [run] = await Promise.all([get(`/api/runs/${this.id}`), showReports(this.id, this.reports)]);
    if (!this.closed) showConfig(this.config, run);
  }
}

// The points received so far. The server sends what is new, and from which step on to drop what is here.
class Metrics {
  constructor() {
    this.version = "";
    this.last = -1;
    this.width = 1;
    this.points = { step: [], loss: [], lr: [], tokens_per_s: [], low: [], high: [] };
    this.evals = {};
  }

  query() {
    return new URLSearchParams({ after: this.last, version: this.version });
  }

  // Returns whether anything changed.
  add(answer) {
    const same = answer.version === this.version && answer.last_step === (this.last < 0 ? null : this.last);
    if (same) return false;
    cut(this.points, answer.from);
    for (const [name, values] of Object.entries(this.points)) values.push(...(answer.points[name] ?? []));
    for (const line of Object.values(this.evals)) cut(line, answer.from);
    for (const [name, line] of Object.entries(answer.evals)) {
      const known = (this.evals[name] ??= { step: [], loss: [] });
      known.step.push(...line.step);
      known.loss.push(...line.loss);
    }
    for (const name of Object.keys(this.evals)) if (!this.evals[name].step.length) delete this.evals[name];
    this.version = answer.version;
    this.width = answer.width;
    this.last = answer.last_step ?? -1;
    return true;
  }

  newest() {
    return { loss: this.points.loss.at(-1), tokens_per_s: this.points.tokens_per_s.at(-1) };
  }
}

function cut(columns, from) {
  const at = columns.step.findIndex((step) => step >= from);
  if (at >= 0) for (const values of Object.values(columns)) values.length = Math.min(values.length, at);
}

// The range of the losses after the first steps, in which the loss falls from ln V; null for short runs.
function lateRange(series, last) {
  if (last < LEAST_STEPS) return null;
  let [low, high] = [Infinity, -Infinity];
  for (const line of series) {
    line.x.forEach((step, i) => {
      const value = line.y[i];
      if (value == null || step < SKIPPED * last) return;
      [low, high] = [Math.min(low, value), Math.max(high, value)];
    });
  }
  return low < high ? [low, high] : null;
}

function section(title, ...children) {
  const heading = el("h2", { id: freshId("heading") }, title);
  return el("section", { class: "panel", "aria-labelledby": heading.id }, heading, ...children);
}

function fact(name, value) {
  return value != null && el("span", {}, `${name} `, el("b", {}, shortNumber(value)));
}

function showConfig(node, run) {
  if (!run.data) {
    replace(node, el("p", { class: "hint" }, "The config of this run cannot be read."));
    return;
  }
  const rows = Object.entries(run.differences).map(([key, { default: old, value }]) => el("tr", {}, el("th", { scope: "row" }, key), el("td", {}, plain(value)), el("td", {}, plain(old))));
  replace(
    node, el("p", {}, `${run.task}, context ${count(run.context)}, vocabulary ${count(run.vocabulary)}.`),
    el("ul", {}, run.data.map((line) => el("li", {}, line))),
    rows.length > 0 && el("details", {}, el("summary", {}, `${rows.length} settings differ from the defaults`), el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Settings" }, el("table", {}, el("thead", {}, el("tr", {}, ["Setting", "Value", "Default"].map((name) => el("th", { scope: "col" }, name)))), el("tbody", {}, rows)))),
    el("details", {}, el("summary", {}, `${Object.keys(run.checkpoints).length} checkpoints`), el("ul", {}, Object.entries(run.checkpoints).map(([name, size]) => el("li", {}, `${name}: ${run.same_files[name] ? `same file as ${run.same_files[name]}` : `${shortNumber(size)}B`}`)))),
    run.next.length > 0 && el("div", {}, el("h3", {}, "Next"), el("pre", { class: "text", tabindex: "0", role: "region", "aria-label": "Next commands" }, run.next.join("\n"))),
  );
}

function plain(value) {
  return value !== null && typeof value === "object" ? JSON.stringify(value) : String(value);
}
