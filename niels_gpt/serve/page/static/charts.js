// Line charts as SVG, drawn by hand. Every chart has a legend, a cursor for pointer and arrow keys, and a table.

import { button, el, freshId, replace } from "./dom.js";

const HEIGHT = 260;
const MARGIN = { top: 12, right: 14, bottom: 40 };
const COLORS = 6;
const TABLE_ROWS = 60;
const DASHES = ["", "6 3", "2 3", "9 3 2 3"];

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) if (value != null) node.setAttribute(name, String(value));
  node.append(...children);
  return node;
}

// A number with three to four digits, as text.
export function shortNumber(value) {
  if (value == null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && size < 1e-3) return value.toExponential(2).replace("e-", "e−");
  for (const [unit, name] of [[1e9, "B"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= unit) return `${Number((value / (name === "k" ? 1e3 : unit)).toPrecision(4))}${name}`;
  }
  return String(Number(value.toPrecision(4)));
}

// Exponential moving average without a bias to its first value; `weight` 0 changes nothing. Unknown values stay.
export function smooth(values, weight) {
  let mean = 0;
  let total = 0;
  return values.map((value) => {
    if (value == null) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

// Round values between low and high, about `number` of them.
export function ticks(low, high, number) {
  const rough = (high - low) / Math.max(number, 1);
  if (!(rough > 0) || !Number.isFinite(rough)) return [low];
  const base = 10 ** Math.floor(Math.log10(rough));
  const step = base * [1, 2, 2.5, 5, 10].find((digit) => digit * base >= rough * (1 - 1e-9));
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i <= Math.floor(high / step + 1e-9); i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

function logTicks(low, high, number) {
  if (high / low < 8) return ticks(low, high, 1.8 * number).filter((value) => value > 0);
  const found = [];
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++) {
    for (const digit of high / low < 300 ? [1, 2, 5] : [1]) found.push(digit * 10 ** e);
  }
  return found.filter((value) => value >= low * (1 - 1e-9) && value <= high * (1 + 1e-9));
}

// Options: title, xLabel, yLabel, onPick(step) for a button beside the cursor, pickLabel.
// update({ series, log, range }): series are { key, name, x, y, low, high, dots, faint, color, dash, companion },
// with null in y for unknown values. `companion`: no entry in legend and table. `range`: [low, high] of y.
export class LineChart {
  constructor(options) {
    this.options = options;
    this.hidden = new Set();
    this.data = { series: [], log: false, range: null };
    this.cursor = null;
    const id = freshId("chart");
    this.plot = el("div", {
      class: "plot", role: "slider", tabindex: "0", "aria-label": `${options.title}: cursor`, "aria-describedby": `${id}-about`,
      "aria-orientation": "horizontal", onkeydown: (event) => this.onKey(event), onpointermove: (event) => this.onPointer(event),
      onpointerdown: (event) => this.onPointer(event), onpointerleave: (event) => event.pointerType === "mouse" && this.point(null),
    });
    this.legend = el("div", { class: "legend row", role: "group", "aria-label": `Lines of ${options.title}` });
    this.about = el("p", { class: "visually-hidden", id: `${id}-about` });
    this.readout = el("span", {});
    this.pick = options.onPick && button(options.pickLabel, () => options.onPick(this.cursor), { class: "small", hidden: true });
    this.table = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${options.title} as a table` });
    this.details = el("details", { ontoggle: () => this.drawTable() }, el("summary", {}, "Show as a table"), this.table);
    this.node = el(
      "figure", { class: "chart" }, el("figcaption", {}, el("h3", {}, options.title)), this.legend, this.plot, this.about,
      el("p", { class: "readout hint" }, this.readout, this.pick), this.details,
    );
    this.clip = `${id}-clip`;
    this.resized = new ResizeObserver(() => {
      if (this.plot.clientWidth !== this.width) this.draw();
    });
    this.resized.observe(this.plot);
  }

  close() {
    this.resized.disconnect();
  }

  update(data) {
    const keys = (list) => list.map((line) => line.key).join("\n");
    const same = keys(this.data.series) === keys(data.series);
    this.data = { log: false, range: null, ...data };
    this.xs = [...new Set(this.data.series.flatMap((line) => line.x))].sort((a, b) => a - b);
    if (!same) this.drawLegend();
    this.draw();
    this.drawTable();
    this.describe();
  }

  get shown() {
    return this.data.series.filter((line) => !this.hidden.has(line.companion ?? line.key));
  }

  drawLegend() {
    const named = this.data.series.filter((line) => !line.companion);
    replace(this.legend, named.length < 2 ? [] : named.map((line) => {
      const sample = svg("svg", { width: 26, height: 10, "aria-hidden": "true" });
      sample.append(svg("line", { x1: 1, x2: 25, y1: 5, y2: 5, "stroke-dasharray": dashOf(line), class: `stroke ${colorOf(line)}` }));
      if (line.dots) sample.append(svg("circle", { cx: 13, cy: 5, r: 3, class: `fill ${colorOf(line)}` }));
      const toggle = (event) => {
        const off = !this.hidden.delete(line.key);
        if (off) this.hidden.add(line.key);
        event.currentTarget.setAttribute("aria-pressed", String(!off));
        this.draw();
      };
      const pressed = String(!this.hidden.has(line.key));
      return el("button", { type: "button", class: "small key", "aria-pressed": pressed, onclick: toggle }, sample, line.name);
    }));
  }

  scales() {
    const positive = (value) => value != null && (!this.data.log || value > 0);
    const shown = this.shown;
    let [low, high] = this.data.range ?? [Infinity, -Infinity];
    if (!this.data.range) {
      for (const line of shown) {
        for (const value of line.y) if (positive(value)) [low, high] = [Math.min(low, value), Math.max(high, value)];
      }
    }
    if (this.data.log && !(low > 0)) low = high > 0 ? high / 1000 : 1;
    if (!(low <= high)) [low, high] = [this.data.log ? 0.1 : 0, 1];
    if (low === high) [low, high] = this.data.log ? [low / 2, high * 2] : [low - Math.abs(low || 1) / 2, high + Math.abs(high || 1) / 2];
    else if (this.data.log) [low, high] = [low / (high / low) ** 0.03, high * (high / low) ** 0.03];
    else [low, high] = [low - (high - low) * 0.04, high + (high - low) * 0.04];
    const last = Math.max(this.xs.at(-1) ?? 1, 1);
    const first = (this.xs[0] ?? 0) < last / 10 ? 0 : Math.min(this.xs[0], last - 1);
    return { low, high, first, last };
  }

  draw() {
    this.width = this.plot.clientWidth;
    if (!this.width || !this.xs) return;
    const { low, high, first, last } = this.scales();
    const log = this.data.log;
    const yTicks = (log ? logTicks : ticks)(low, high, 5);
    const left = 14 + 7.2 * Math.max(...yTicks.map((value) => shortNumber(value).length), 2) + 14;
    const right = this.width - MARGIN.right;
    const bottom = HEIGHT - MARGIN.bottom;
    const transform = log ? Math.log : Number;
    const x = (value) => left + ((value - first) / (last - first)) * (right - left);
    const y = (value) => bottom - ((transform(value) - transform(low)) / (transform(high) - transform(low))) * (bottom - MARGIN.top);
    this.position = { x, y, left, right, first, last };
    const root = svg("svg", { viewBox: `0 0 ${this.width} ${HEIGHT}`, width: this.width, height: HEIGHT, "aria-hidden": "true" });
    const clip = svg("clipPath", { id: this.clip }, svg("rect", { x: left - 4, y: MARGIN.top - 4, width: right - left + 8, height: bottom - MARGIN.top + 8 }));
    root.append(svg("defs", {}, clip));
    const grid = svg("g", { class: "grid" });
    for (const value of yTicks) {
      grid.append(svg("line", { x1: left, x2: right, y1: y(value), y2: y(value) }));
      grid.append(text(left - 6, y(value) + 4, shortNumber(value), "end"));
    }
    const xTicks = ticks(first, last, Math.max(2, Math.floor((right - left) / 90))).filter(Number.isInteger);
    for (const value of xTicks) {
      grid.append(svg("line", { x1: x(value), x2: x(value), y1: bottom, y2: bottom + 4 }));
      const label = value.toLocaleString("en-US");
      const end = x(value) + label.length * 3.6 > this.width;
      grid.append(text(end ? this.width - 1 : x(value), bottom + 17, label, end ? "end" : "middle"));
    }
    grid.append(svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
    grid.append(text((left + right) / 2, HEIGHT - 4, this.options.xLabel, "middle"));
    const name = text(0, 0, this.options.yLabel, "middle");
    name.setAttribute("transform", `translate(11 ${(MARGIN.top + bottom) / 2}) rotate(-90)`);
    grid.append(name);
    root.append(grid);
    const lines = svg("g", { "clip-path": `url(#${this.clip})` });
    for (const line of this.shown) lines.append(...drawLine(line, x, y, log));
    root.append(lines);
    this.marker = svg("g", { class: "cursor" });
    root.append(this.marker);
    replace(this.plot, root);
    if (!this.xs.length) root.append(text((left + right) / 2, HEIGHT / 2, "no steps yet", "middle"));
    this.plot.setAttribute("aria-valuemin", first);
    this.plot.setAttribute("aria-valuemax", last);
    this.point(this.cursor, false);
  }

  // Move the cursor to a step of the data; null removes it.
  point(step, announce = true) {
    this.cursor = step;
    if (this.marker) this.marker.replaceChildren();
    if (this.pick) this.pick.hidden = step == null;
    const at = step ?? this.xs?.at(-1) ?? 0;
    const values = [];
    for (const line of this.shown) {
      const i = nearest(line.x, at);
      if (i < 0 || line.y[i] == null || line.companion) continue;
      values.push(`${line.name} ${shortNumber(line.y[i])}${line.x[i] === at ? "" : ` (step ${line.x[i].toLocaleString("en-US")})`}`);
      if (step != null && this.position && (!this.data.log || line.y[i] > 0)) {
        this.marker.append(svg("circle", { class: `fill ${colorOf(line)}`, cx: this.position.x(line.x[i]), cy: this.position.y(line.y[i]), r: 4 }));
      }
    }
    const said = this.xs?.length ? `Step ${at.toLocaleString("en-US")}: ${values.join(", ")}` : "no steps yet";
    if (step != null && this.position) {
      const at = this.position.x(step);
      this.marker.prepend(svg("line", { x1: at, x2: at, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }));
    }
    this.readout.textContent = said;
    if (announce || !this.plot.hasAttribute("aria-valuetext")) {
      this.plot.setAttribute("aria-valuenow", at);
      this.plot.setAttribute("aria-valuetext", said);
    }
  }

  onPointer(event) {
    if (!this.position || !this.xs.length) return;
    const { left, right, first, last } = this.position;
    const place = (event.clientX - this.plot.getBoundingClientRect().left - left) / (right - left);
    this.point(this.xs[nearest(this.xs, first + place * (last - first))]);
  }

  onKey(event) {
    if (!this.xs?.length) return;
    const i = this.cursor == null ? this.xs.length - 1 : nearest(this.xs, this.cursor);
    const far = Math.max(1, Math.round(this.xs.length / 20));
    const moves = { ArrowLeft: i - 1, ArrowDown: i - 1, ArrowRight: i + 1, ArrowUp: i + 1, PageDown: i - far, PageUp: i + far, Home: 0, End: this.xs.length - 1 };
    if (event.key === "Escape") this.point(null);
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.point(this.xs[Math.min(Math.max(moves[event.key], 0), this.xs.length - 1)]);
  }

  describe() {
    const said = this.data.series.filter((line) => !line.companion).map((line) => {
      const known = line.y.flatMap((value, i) => (value == null ? [] : [[value, line.x[i]]]));
      if (!known.length) return "";
      const least = known.reduce((a, b) => (b[0] < a[0] ? b : a));
      const [begin, end] = [known[0], known.at(-1)];
      return `${line.name}: ${shortNumber(begin[0])} at step ${begin[1]}, ${shortNumber(end[0])} at step ${end[1]}, lowest ${shortNumber(least[0])} at step ${least[1]}.`;
    });
    this.about.textContent = `Line chart of ${this.options.yLabel} by ${this.options.xLabel}. ${said.filter(Boolean).join(" ")}`;
  }

  drawTable() {
    if (!this.details.open || !this.xs) return;
    const named = this.data.series.filter((line) => !line.companion);
    const sparse = new Set(named.filter((line) => line.dots).flatMap((line) => line.x));
    const chosen = thin(sparse.size ? this.xs.filter((value) => sparse.has(value)) : this.xs, TABLE_ROWS);
    const last = this.xs.at(-1);
    if (last != null && chosen.at(-1) !== last) chosen.push(last);
    const at = (line, value) => {
      const i = nearest(line.x, value);
      return i >= 0 && line.y[i] != null && (!line.dots || line.x[i] === value) ? shortNumber(line.y[i]) : "";
    };
    replace(this.table, el(
      "table", {}, el("caption", { class: "visually-hidden" }, this.options.title),
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, this.options.xLabel), named.map((line) => el("th", { scope: "col" }, line.name)))),
      el("tbody", {}, chosen.reverse().map((value) => el(
        "tr", {}, el("th", { scope: "row" }, value.toLocaleString("en-US")), named.map((line) => el("td", {}, at(line, value))),
      ))),
    ));
  }
}

function text(x, y, value, anchor) {
  return svg("text", { x, y, "text-anchor": anchor }, value);
}

function colorOf(line) {
  return `s${(line.color ?? 0) % COLORS}`;
}

function dashOf(line) {
  return DASHES[(line.dash ?? 0) % DASHES.length] || null;
}

function drawLine(line, x, y, log) {
  const good = (value) => value != null && (!log || value > 0);
  const found = [];
  if (line.low && line.high) {
    const up = line.x.flatMap((value, i) => (good(line.low[i]) && good(line.high[i]) ? [`${x(value).toFixed(1)} ${y(line.high[i]).toFixed(1)}`] : []));
    const down = line.x.flatMap((value, i) => (good(line.low[i]) && good(line.high[i]) ? [`${x(value).toFixed(1)} ${y(line.low[i]).toFixed(1)}`] : []));
    if (up.length > 1) found.push(svg("path", { class: `band ${colorOf(line)}`, d: `M${up.join("L")}L${down.reverse().join("L")}Z` }));
  }
  let path = "";
  let pen = "M";
  line.x.forEach((value, i) => {
    if (good(line.y[i])) {
      path += `${pen}${x(value).toFixed(1)} ${y(line.y[i]).toFixed(1)}`;
      pen = "L";
    } else if (line.y[i] == null) pen = "M";
  });
  if (path) found.push(svg("path", { class: `stroke ${colorOf(line)}${line.faint ? " faint" : ""}`, d: path, "stroke-dasharray": dashOf(line), "data-line": line.key }));
  const dots = line.dots ? line.x.length : line.x.length === 1 ? 1 : 0;
  if (dots && dots <= 80) {
    line.x.forEach((value, i) => good(line.y[i]) && found.push(svg("circle", { class: `fill ${colorOf(line)}`, cx: x(value).toFixed(1), cy: y(line.y[i]).toFixed(1), r: 2.6 })));
  }
  return found;
}

// Index of the value nearest to `at` in sorted values; -1 for none.
export function nearest(sorted, at) {
  let [low, high] = [0, sorted.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < at) low = middle + 1;
    else high = middle;
  }
  return low > 0 && at - sorted[low - 1] < sorted[low] - at ? low - 1 : Math.min(low, sorted.length - 1);
}

function thin(values, most) {
  const every = Math.ceil(values.length / most) || 1;
  return values.filter((_, i) => (values.length - 1 - i) % every === 0);
}
