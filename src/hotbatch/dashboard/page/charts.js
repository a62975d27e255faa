// The charts: uPlot, dressed like the rest of the page.
//
// A chart keeps its own data and can be built again at any time, which is how it follows the
// theme: uPlot takes its colours once.

import { mix, palette } from "./colours.js";

const SECONDS = 120; // that a chart over time shows, once it has so much to show
const FIRST_SECONDS = 30;
const TOKENS = [1, 4, 16, 64, 256, 1024, 4096];
const FONT = "11px system-ui, sans-serif";

class Chart {
  constructor(element) {
    this.element = element;
    this.plot = null;
    new ResizeObserver(() => {
      if (!this.plot || this.element.clientWidth === this.plot.width && this.element.clientHeight === this.plot.height) return;
      this.plot.setSize(this.#size());
    }).observe(element);
  }

  #size() {
    return { width: Math.max(120, this.element.clientWidth), height: this.element.clientHeight };
  }

  /** Draws with what it has; builds the plot if there is none in these colours yet. */
  draw() {
    if (!this.plot) {
      this.colours = palette();
      const options = { ...this.#size(), cursor: { show: false }, legend: { show: false }, padding: [8, 22, 0, 0], ...this.options() };
      this.plot = new window.uPlot(options, this.data(), this.element);
    } else {
      this.plot.setData(this.data());
    }
  }

  restyle() {
    this.plot?.destroy();
    this.plot = null;
    this.draw();
  }

  colour(name) {
    const [base, share] = name.split("/");
    return share ? mix(this.colours[base], this.colours.panel, Number(share)) : this.colours[base];
  }

  axis(values, more = {}) {
    return {
      stroke: () => this.colours.soft,
      font: FONT,
      grid: { stroke: () => this.colours.line, width: 1 },
      ticks: { show: false },
      gap: 4,
      values,
      ...more,
    };
  }
}

/** Lines or a stack over the last two minutes. `series` are {name, colour}; a colour is a
    variable of the sheet, with a share of it behind a slash. */
export class TimeChart extends Chart {
  constructor(element, { series, stacked = false, most = null, least = 1, unit = "", mark = null }) {
    super(element);
    Object.assign(this, { series, stacked, most, least, unit, mark });
    this.clear();
  }

  clear() {
    this.times = [];
    this.values = this.series.map(() => []);
    this.line = [];
    this.draw();
  }

  /** Begins anew with these series, and with a line on top of the stack if there is one. */
  setSeries(series, hasLine = false, mark = this.mark) {
    Object.assign(this, { series, hasLine, mark });
    this.plot?.destroy();
    this.plot = null;
    this.clear();
  }

  push(time, values, line = null) {
    this.times.push(time);
    this.line.push(line);
    values.forEach((value, i) => this.values[i].push(value));
    while (this.times[0] < time - SECONDS - 5) {
      this.times.shift();
      this.line.shift();
      for (const column of this.values) column.shift();
    }
    this.draw();
  }

  data() {
    if (!this.stacked) return [this.times, ...this.values];
    // The sums from the first on, largest first, so that each is painted over the one before.
    const sums = [];
    this.values.forEach((column, i) => sums.push(column.map((value, t) => value + (i ? sums[i - 1][t] : 0))));
    const line = this.hasLine ? [this.line, this.line] : [];
    return [this.times, ...sums.reverse(), ...line];
  }

  options() {
    const lines = this.series.map(({ name, colour }) => {
      const hue = this.colour(colour);
      return this.stacked
        ? { label: name, stroke: hue, width: 0, fill: hue, points: { show: false } }
        : { label: name, stroke: hue, width: 1.75, points: { show: false } };
    });
    if (this.stacked) lines.reverse();
    if (this.hasLine) { // twice: once as a halo that lifts it off the stack
      lines.push({ stroke: this.colour("panel"), width: 4, points: { show: false } });
      lines.push({ stroke: this.colour("ink"), width: 1.75, points: { show: false } });
    }
    const last = () => this.times.at(-1) ?? 0;
    const shown = () => Math.min(SECONDS, Math.max(FIRST_SECONDS, last() - (this.times[0] ?? 0)));
    return {
      scales: {
        x: { time: false, range: () => [last() - shown(), last()] },
        y: { range: (_, low, high) => [0, this.most ?? Math.max(this.least, high ?? 0) * 1.08] },
      },
      axes: [
        this.axis((_, splits) => splits.map((at) => ago(last() - at)), {
          size: 22, grid: { show: false }, splits: () => [last() - shown(), last() - shown() / 2, last()],
        }),
        this.axis((_, splits) => splits.map((value) => `${short(value)}${this.unit}`), { size: 42, space: 34 }),
      ],
      series: [{}, ...lines],
      hooks: { draw: [(plot) => this.#drawMark(plot)] },
    };
  }

  /** A dashed line across, with its name. */
  #drawMark(plot) {
    if (!this.mark) return;
    const y = Math.round(plot.valToPos(this.mark.at, "y", true)) + 0.5;
    const { left, width } = plot.bbox;
    const ink = plot.ctx;
    ink.save();
    ink.strokeStyle = this.colours.ink;
    ink.setLineDash([4, 4]);
    ink.beginPath();
    ink.moveTo(left, y);
    ink.lineTo(left + width, y);
    ink.stroke();
    ink.fillStyle = this.colours.ink;
    ink.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    ink.textAlign = "left";
    ink.fillText(this.mark.name, left + 4, y - 5 * devicePixelRatio);
    ink.restore();
  }
}

/** Milliseconds of a step over its tokens: what was predicted, what steps took, and the last. */
export class CurveChart extends Chart {
  constructor(element) {
    super(element);
    this.clear();
  }

  clear() {
    this.steps = []; // [tokens, milliseconds, isMixed]
    this.curve = [];
    this.draw();
  }

  add(points) {
    this.steps.push(...points);
    if (this.steps.length > 400) this.steps.splice(0, this.steps.length - 400);
  }

  data() {
    const rows = [
      ...this.steps.map(([x, ms, mixed]) => (mixed ? [x, null, null, null, ms] : [x, null, null, ms, null])),
      ...this.curve.map(([x, predicted, best]) => [x, best, predicted, null, null]),
    ].sort((a, b) => a[0] - b[0]);
    return [0, 1, 2, 3, 4].map((column) => rows.map((row) => row[column]));
  }

  options() {
    const dots = (colour, size) => ({
      paths: () => null, stroke: this.colour(colour), points: { show: true, size, fill: this.colour(colour), width: 0 },
    });
    return {
      scales: {
        x: { time: false, distr: 3, log: 2, range: (_, low, high) => [1, Math.max(64, 2 ** Math.ceil(Math.log2(high || 64)))] },
        y: { distr: 3, range: () => this.#range() },
      },
      axes: [
        this.axis((_, splits) => splits, {
          size: 22, grid: { show: false }, filter: (_, splits) => splits,
          splits: (plot) => TOKENS.filter((value) => value <= plot.scales.x.max),
        }),
        this.axis((_, splits) => splits.map((value) => `${value < 1 ? value : short(value)} ms`), {
          size: 52, filter: (_, splits) => splits,
          splits: (plot) => round(plot.scales.y.min, plot.scales.y.max),
        }),
      ],
      series: [
        {},
        { stroke: this.colour("soft"), width: 1.25, dash: [4, 3], spanGaps: true, points: { show: false } },
        { stroke: this.colour("ink"), width: 1.75, spanGaps: true, points: { show: false } },
        dots("soft/0.55", 4),
        dots("host/0.75", 4),
      ],
      hooks: { draw: [(plot) => this.#drawNow(plot)] },
    };
  }

  /** By what was measured and what is possible: a prediction far from all steps may be absurd. */
  #range() {
    const sure = [...this.steps.map(([, ms]) => ms), ...this.curve.map(([, ms, best]) => best ?? ms)].filter((ms) => ms > 0);
    return sure.length ? [Math.min(...sure) * 0.6, Math.max(...sure) * 1.6] : [1, 100];
  }

  /** A ring around the last step: the operating point. */
  #drawNow(plot) {
    const last = this.steps.at(-1);
    if (!last) return;
    const x = plot.valToPos(last[0], "x", true);
    const y = plot.valToPos(last[1], "y", true);
    const ink = plot.ctx;
    ink.save();
    ink.lineWidth = 2 * devicePixelRatio;
    ink.strokeStyle = this.colours.ink;
    ink.fillStyle = this.colours.panel;
    ink.beginPath();
    ink.arc(x, y, 5 * devicePixelRatio, 0, 7);
    ink.fill();
    ink.stroke();
    ink.restore();
  }
}

/** The round numbers of a logarithmic axis. */
function round(low, high) {
  const steps = high / low > 60 ? [1] : high / low > 8 ? [1, 3] : [1, 1.5, 2, 3, 5, 7];
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
    for (const step of steps) {
      const value = Number((step * 10 ** power).toPrecision(3));
      if (value >= low && value <= high) found.push(value);
    }
  }
  return found;
}

function ago(seconds) {
  if (seconds < 1) return "now";
  return seconds < 99 ? `${Math.round(seconds)} s ago` : `${Math.round(seconds / 60)} min ago`;
}

/** 1234 as 1.2k. */
export function short(value) {
  if (value >= 10_000) return `${Math.round(value / 1000)}k`;
  if (value >= 1000) return `${(value / 1000).toFixed(1)}k`;
  return value >= 10 || Number.isInteger(value) ? `${Math.round(value)}` : value.toFixed(1);
}
