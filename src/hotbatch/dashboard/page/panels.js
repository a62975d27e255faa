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

/** What becomes of the time, in the order of the stack: work, then what is lost, then rest. */
const CAUSES = {
  decode: ["writing", "ink/0.34"],
  prefill: ["reading prompts", "ink/0.2"],
  few_sequences: ["too few sequences", "cause-few"],
  seat_limit: ["too few seats", "cause-seats"],
  kv_limit: ["too little KV memory", "cause-kv"],
  prefill_interference: ["prompts beside writers", "cause-prompts"],
  speculation_waste: ["drafts dropped", "cause-drafts"],
  host_gap: ["between steps", "host"],
  kernel_inefficiency: ["kernels below the ceiling", "cause-kernels"],
  no_work: ["no work", "rest"],
};
const stack = (names) => names.map((key) => ({ key, name: CAUSES[key][0], colour: CAUSES[key][1] }));
const WITH_CEILING = stack(Object.keys(CAUSES));
const WITHOUT = [
  { key: "decode", name: "steps of decodes", colour: "ink/0.34" },
  { key: "prefill", name: "steps with prompts", colour: "ink/0.2" },
  ...stack(["host_gap", "no_work"]),
];
const GOOD = 70; // percent of the ceiling, from which on a machine counts as well used

export class Panels {
  constructor() {
    this.hello = null;
    this.recent = []; // gauges of the last seconds, to take differences over a while
    this.busy = new TimeChart(byId("busy-chart"), { series: WITHOUT, stacked: true, most: 100, unit: " %" });
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

  /** Guesses have lanes: the legend says so from now on. */
  noteAhead() {
    if (this.hasAhead) return;
    this.hasAhead = true;
    this.#laneLegend(palette());
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
    text("v-waiting", `${waiting + gauges.evicted}`);
    text("v-paused", [gauges.paused && `${gauges.paused} paused`, gauges.evicted && `${gauges.evicted} evicted`].filter(Boolean).join(", "));
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
    this.#busy(time, gauges, before, wall);
    if (steps) {
      const model = since("decode_seconds") + since("prompt_seconds");
      text("curve-now", `${(since("prompt_tokens") + since("decode_tokens") === 0 ? 0 : (since("prompt_tokens") + since("decode_tokens")) / steps).toFixed(1)} tokens in ${(1000 * model / steps).toFixed(1)} ms`);
    }
  }

  /** The stack of causes, and the decode utilisation on it where the ceiling is known. */
  #busy(time, gauges, before, wall) {
    const isKnown = Boolean(gauges.causes);
    if (isKnown !== (this.busy.series === WITH_CEILING)) {
      this.busy.setSeries(isKnown ? WITH_CEILING : WITHOUT, isKnown, isKnown ? { at: GOOD, name: `${GOOD} %` } : null);
    }
    const seconds = isKnown ? gauges.causes : ownCauses(gauges.totals, wall);
    const earlier = isKnown ? before.causes : ownCauses(before.totals, 0);
    const spent = this.busy.series.map(({ key }) => Math.max(0, seconds[key] - earlier[key]));
    const all = spent.reduce((sum, value) => sum + value, 0) || 1;
    const shares = spent.map((value) => 100 * value / all);
    const utilisation = gauges.decode_utilisation ?? null;
    const isDecoding = gauges.totals.decode_tokens > before.totals.decode_tokens;
    this.busy.push(time, shares, utilisation !== null && isDecoding ? Math.min(100, 100 * utilisation) : null);
    text("v-busy-name", isKnown ? "Decode utilisation" : "Model at work");
    text("v-busy", isKnown ? (utilisation === null ? "–" : percent(utilisation)) : `${Math.round(shares[0] + shares[1])} %`);
    text("v-busy-note", isKnown ? "of the ceiling" : "of the time");
    const losses = this.busy.series.map(({ key, name }, i) => [shares[i], name, key]).filter(([, , key]) => key !== "decode" && key !== "prefill");
    const [share, name] = losses.reduce((most, loss) => (loss[0] > most[0] ? loss : most));
    text("busy-now", share >= 1 ? `most is lost to: ${name}, ${Math.round(share)} %` : "");
    this.busy.series.forEach(({ key }, i) => {
      const item = byId(`cause-${key}`);
      if (item) item.hidden = shares[i] < 0.5;
    });
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
    byId("busy-legend").replaceChildren(...WITH_CEILING.map(({ key, name, colour }) => {
      const item = legendItem(name, [rect(0, 2, 9, 9, shade(colour))], 9);
      item.id = `cause-${key}`;
      return item;
    }));
    fill("rate-legend", this.rate.series);
    fill("kv-legend", this.kv.series);
    byId("curve-legend").replaceChildren(
      legendItem("decodes alone, predicted", [rect(0, 6, 14, 2, colours.ink)], 14),
      legendItem("at the ceiling", [rect(0, 6, 4, 2, colours.soft), rect(6, 6, 4, 2, colours.soft)], 11),
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
      ...(this.hasAhead ? [legendItem("ahead", [rect(0, 1, 4, 11, colours.ahead)], 4)] : []),
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

/** Seconds by cause as far as they are known without a ceiling. */
function ownCauses(totals, wall) {
  const { decode_seconds: decode, prompt_seconds: prefill, host_seconds: host } = totals;
  return { decode, prefill, host_gap: host, no_work: wall };
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
