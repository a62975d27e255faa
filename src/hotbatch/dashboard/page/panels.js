// Everything on the page but the lanes and the playground: figures, charts and tables, twice a
// second, from the gauges that come with a frame.

import { CurveChart, TimeChart, short } from "./charts.js";
import { palette, mix } from "./colours.js";

const byId = (id) => document.getElementById(id);
const text = (id, value) => {
  const element = byId(id);
  if (element.textContent !== value) element.textContent = value;
};
const percent = (share) => `${Math.round(share * 100)} %`;

// Figures are means over so many seconds: they can be read, and long steps do not make them jump.
const CALM = 2;

/** What becomes of the time, in the order of the stack. */
const TIMES = [
  { name: "steps of decodes", colour: "ink/0.75" },
  { name: "steps with prompts", colour: "ink/0.42" },
  { name: "between steps", colour: "host" },
  { name: "no work", colour: "rest" },
];

export class Panels {
  constructor() {
    this.hello = null;
    this.recent = []; // gauges of the last seconds, to take differences over a while
    this.busy = new TimeChart(byId("busy-chart"), { series: TIMES, stacked: true, most: 100, unit: " %", mark: { at: 70, name: "70 %" } });
    this.curve = new CurveChart(byId("curve-chart"));
    this.rate = new TimeChart(byId("rate-chart"), {
      series: [{ name: "written", colour: "ink" }, { name: "prompts read", colour: "faint" }], least: 10,
    });
    this.queue = new TimeChart(byId("queue-chart"), { series: [{ name: "", colour: "rest" }], stacked: true, least: 4 });
    this.kv = new TimeChart(byId("kv-chart"), {
      series: [{ name: "in use", colour: "ink/0.75" }, { name: "kept for reuse", colour: "ink/0.25" }], stacked: true, most: 100, unit: " %",
    });
    this.charts = [this.busy, this.curve, this.rate, this.queue, this.kv];
  }

  begin(hello) {
    this.hello = hello;
    this.recent = [];
    this.order = hello.classes.map((_, rank) => rank).reverse(); // most urgent first
    this.queue.setSeries(this.order.map((rank) => ({ name: hello.classes[rank], colour: hello.classes[rank] })));
    for (const chart of this.charts) chart.clear();
    text("model", hello.model);
    text("machine", [hello.precision, hello.device].filter(Boolean).join(" on "));
    text("version", `hotbatch ${hello.version}`);
    document.title = `${hello.model} · hotbatch`;
    this.#legends();
    this.#tables();
  }

  restyle() {
    for (const chart of this.charts) chart.restyle();
    if (this.hello) this.#legends();
  }

  steps(points) {
    this.curve.add(points);
  }

  gauges(time, gauges) {
    this.recent.push({ time, ...gauges });
    while (this.recent.length > 2 && this.recent[1].time <= time - CALM) this.recent.shift();
    this.#state(time, gauges);
    const before = this.recent[0];
    if (time > before.time) this.#rates(time, gauges, before);
    this.#latency(gauges.latency_ms);
    if (gauges.curve) {
      this.curve.curve = gauges.curve.points;
      this.curve.draw();
    }
  }

  // ---- what is

  #state(time, gauges) {
    const { hello } = this;
    const waiting = gauges.waiting.reduce((sum, count) => sum + count, 0);
    text("v-running", `${gauges.running}`);
    text("v-seats", `of ${hello.seats} seats`);
    text("v-waiting", `${waiting + gauges.returning}`);
    text("v-paused", [gauges.paused && `${gauges.paused} paused`, gauges.returning && `${gauges.returning} evicted`].filter(Boolean).join(", "));
    const [used, cached, free] = gauges.kv;
    const all = used + cached + free;
    text("v-kv", percent(used / all));
    text("v-kv-note", `of ${short(all * hello.block_size)} tokens`);
    text("kv-now", `${used} in use, ${cached} kept, ${free} free`);
    this.kv.push(time, [100 * used / all, 100 * cached / all]);
    this.queue.push(time, this.order.map((rank) => gauges.waiting[rank]));
    text("queue-now", gauges.refused ? `${gauges.refused} refused since the start` : "");
    for (const rank of this.order) {
      text(`wait-count-${rank}`, `${gauges.waiting[rank]}`);
      text(`wait-long-${rank}`, gauges.waiting[rank] ? `oldest ${seconds(gauges.waits[rank])}` : "–");
    }
  }

  // ---- what happens

  #rates(time, gauges, before) {
    const wall = time - before.time;
    const since = (name) => gauges.totals[name] - before.totals[name];
    const written = (gauges.generated - before.generated) / wall;
    const read = Math.max(0, since("prompt_tokens")) / wall;
    this.rate.push(time, [written, read]);
    text("v-tokens", short(written));
    text("v-prompt", read >= 1 ? `and ${short(read)} read` : "");
    const steps = since("steps");
    text("rate-now", steps ? `${short(steps / wall)} steps a second, ${(since("sampled_tokens") / steps).toFixed(1)} tokens each` : "");
    const share = (value) => Math.min(100, Math.max(0, 100 * value / wall));
    const parts = [share(since("decode_seconds")), share(since("prompt_seconds")), share(since("host_seconds"))];
    parts.push(Math.max(0, 100 - parts[0] - parts[1] - parts[2]));
    this.busy.push(time, parts);
    text("v-busy", percent((parts[0] + parts[1]) / 100));
    text("v-busy-note", "of the time");
    text("busy-now", `${Math.round(parts[2])} % between steps, ${Math.round(parts[3])} % without work`);
    if (steps) {
      const model = since("decode_seconds") + since("prompt_seconds");
      text("curve-now", `${(since("prompt_tokens") + since("decode_tokens") === 0 ? 0 : (since("prompt_tokens") + since("decode_tokens")) / steps).toFixed(1)} tokens in ${(1000 * model / steps).toFixed(1)} ms`);
    }
  }

  #latency(latencies) {
    for (const rank of this.order) {
      latencies[rank].forEach((quantiles, kind) => {
        const target = this.hello.targets_ms[rank][kind];
        const cell = `lat-${rank}-${kind}`;
        text(cell, quantiles ? `${milliseconds(quantiles[0])} · ${milliseconds(quantiles[1])}` : "–");
        const gauge = byId(`${cell}-gauge`);
        if (!gauge) return;
        const share = quantiles ? quantiles[1] / target : 0;
        gauge.classList.toggle("missed", share > 1);
        // The target stands at two thirds, so that there is room to be late.
        gauge.firstChild.style.width = `${Math.min(100, share * 66.6)}%`;
      });
    }
  }

  // ---- what is made once

  #legends() {
    const colours = palette();
    const shade = (name) => {
      const [base, share] = name.split("/");
      return share ? mix(colours[base], colours.panel, Number(share)) : colours[base];
    };
    const fill = (id, series) => {
      byId(id).replaceChildren(...series.map(({ name, colour }) => legendItem(name, [rect(0, 2, 9, 9, shade(colour))], 9)));
    };
    fill("busy-legend", this.busy.series);
    fill("rate-legend", this.rate.series);
    fill("kv-legend", this.kv.series);
    byId("curve-legend").replaceChildren(
      legendItem("predicted, decodes alone", [rect(0, 6, 14, 2, colours.ink)], 14),
      legendItem("steps of decodes", [dot(shade("soft/0.55"))], 9),
      legendItem("with prompts", [dot(shade("host/0.75"))], 9),
    );
    this.#laneLegend(colours);
  }

  #laneLegend(colours) {
    const { classes } = this.hello;
    const hues = this.order.map((rank) => colours[classes[rank]]);
    const ink = colours.ink;
    const soft = mix(ink, colours.panel, 0.4);
    byId("legend").replaceChildren(
      ...this.order.map((rank, i) => legendItem(classes[rank], [rect(0, 1, 4, 11, hues[i])], 4)),
      legendItem("prompt", [rect(0, 1, 12, 11, ink)], 12),
      legendItem("token", [rect(0, 6, 12, 6, soft)], 12),
      legendItem("draft kept, dropped", [rect(0, 6, 5, 6, soft), rect(0, 1, 5, 5, ink), rect(7, 6, 5, 6, soft), rect(7, 1, 5, 5, colours.alarm)], 12),
      legendItem("paused", [rect(0, 6, 5, 1.5, soft), rect(8, 6, 5, 1.5, soft)], 13),
      legendItem("evicted", [0, 4, 8].map((x) => rect(x, 6, 2, 1.5, colours.alarm)), 11),
    );
  }

  #tables() {
    const { classes, targets_ms: targets } = this.hello;
    byId("latency").replaceChildren(
      row("th", ["", "first token", "each token"]),
      ...this.order.map((rank) => {
        const line = row("td", [swatched(classes[rank]), "", ""]);
        line.dataset.class = classes[rank];
        [0, 1].forEach((kind) => {
          const cell = line.children[kind + 1];
          const value = document.createElement("span");
          value.id = `lat-${rank}-${kind}`;
          cell.append(value);
          const target = targets[rank][kind];
          if (!target) return;
          const small = document.createElement("small");
          small.textContent = ` / ${milliseconds(target)}`;
          const gauge = document.createElement("div");
          gauge.className = "gauge";
          gauge.id = `lat-${rank}-${kind}-gauge`;
          gauge.append(document.createElement("i"), document.createElement("u"));
          cell.append(small, gauge);
        });
        return line;
      }),
    );
    byId("queue").replaceChildren(...this.order.map((rank) => {
      const line = row("td", [swatched(classes[rank]), "", ""]);
      line.dataset.class = classes[rank];
      line.children[1].id = `wait-count-${rank}`;
      line.children[2].id = `wait-long-${rank}`;
      line.children[2].className = "number";
      return line;
    }));
  }
}

function row(kind, cells) {
  const line = document.createElement("tr");
  for (const content of cells) {
    const cell = document.createElement(kind);
    cell.append(content);
    line.append(cell);
  }
  return line;
}

function swatched(name) {
  const part = document.createElement("span");
  const mark = document.createElement("i");
  mark.className = "swatch";
  part.append(mark, name);
  return part;
}

function legendItem(name, shapes, width) {
  const item = document.createElement("li");
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("width", width);
  svg.setAttribute("height", 13);
  svg.setAttribute("aria-hidden", "true");
  svg.append(...shapes);
  item.append(svg, name);
  return item;
}

function rect(x, y, width, height, colour) {
  const shape = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  for (const [key, value] of Object.entries({ x, y, width, height, rx: Math.min(2, height / 3), fill: colour })) shape.setAttribute(key, value);
  return shape;
}

function dot(colour) {
  const shape = document.createElementNS("http://www.w3.org/2000/svg", "circle");
  for (const [key, value] of Object.entries({ cx: 4.5, cy: 6.5, r: 3, fill: colour })) shape.setAttribute(key, value);
  return shape;
}

const seconds = (value) => (value < 10 ? `${value.toFixed(1)} s` : `${Math.round(value)} s`);
const milliseconds = (value) => (value < 1000 ? `${value < 10 ? value.toFixed(1) : Math.round(value)} ms` : seconds(value / 1000));
