// The batch as lanes over time, on a canvas.
//
// Cells are drawn once, when their frame comes, into a strip that is used as a ring; sixty times
// a second the strip is only copied, shifted to the moment. So the cost does not grow with what
// is shown, and 64 lanes at 20 frames a second leave the browser nearly idle. A change of size,
// span, theme or number of lanes draws the strip anew from the frames it shows.

import { mix, palette } from "./colours.js";
import { AHEAD, CELL, DONE, EVICTED, PAUSED, STATES } from "./lane_book.js";

const ROWS = [12, 16, 24, 32, 48, 64, 96, 128, 192, 256];
const SPANS = [15, 30, 60, 120]; // CSS pixels a second
const DELAY = 0.15; // seconds behind the server, so that frames are there when they are due
const EDGE = 6; // CSS pixels free at the right
const STILL = matchMedia("(prefers-reduced-motion: reduce)");

export class Lanes {
  /** @param {HTMLCanvasElement} canvas @param {import("./lane_book.js").LaneBook} book */
  constructor(canvas, book, classes) {
    this.canvas = canvas;
    this.book = book;
    this.classes = classes;
    this.view = canvas.getContext("2d", { alpha: false });
    this.strip = document.createElement("canvas");
    this.ink = this.strip.getContext("2d");
    this.frames = [];
    this.span = 2;
    this.rows = ROWS[0];
    this.offset = null; // the server's clock minus ours
    this.held = null; // the moment shown while the picture is held
    this.chosen = -1; // seat
    this.drawnAt = -Infinity;
    this.quiet = 0;
    this.restyle();
    new ResizeObserver(() => this.#resize()).observe(canvas.parentElement);
    requestAnimationFrame((at) => this.#tick(at));
  }

  /** The server has begun anew: nothing of what was shown goes on. */
  clear() {
    this.frames = [];
    this.offset = null;
    this.#redraw();
  }

  restyle() {
    const colours = palette();
    this.colours = colours;
    this.tones = this.classes.map((name) => ({
      name,
      full: colours[name],
      soft: mix(colours[name], colours.well, 0.45),
      faint: mix(colours[name], colours.well, 0.22),
    }));
    this.alarm = mix(colours.alarm, colours.well, 0.85);
    this.waste = mix(colours.alarm, colours.well, 0.5);
    this.#resize();
  }

  /** Seconds that are visible. */
  get seconds() {
    return (this.canvas.clientWidth - this.gutter - EDGE) / SPANS[this.span];
  }

  zoom(by) {
    this.span = Math.min(SPANS.length - 1, Math.max(0, this.span + by));
    this.#redraw();
  }

  hold(isHeld) {
    this.held = isHeld ? this.#now() : null;
  }

  /** `cells` as LaneBook.take gives them, of steps that ran from `from` to `to`. */
  add(time, span, cells) {
    const offset = time - performance.now() / 1000;
    // The frame that took least time on its way is nearest the truth; clocks drift, so slowly on.
    this.offset = this.offset === null ? offset : Math.max(this.offset - 0.0005, offset);
    if (!span || !cells.length) return;
    const frame = { from: span[0], to: Math.max(span[1], span[0] + 0.002), cells };
    this.frames.push(frame);
    if (this.#fitRows()) this.#redraw();
    else this.#paint(frame);
  }

  /** The seat under a point of the canvas, in CSS pixels; -1 if there is none. */
  seatAt(y) {
    const seat = Math.floor(y / this.pitch);
    return seat >= 0 && seat < this.rows ? seat : -1;
  }

  topOf(seat) {
    return seat * this.pitch;
  }

  say(seat) {
    const lane = this.book.seats[seat];
    if (!lane) return "";
    if (lane.class === AHEAD) return `computed ahead, nobody has asked: ${lane.written} tokens written, ${lane.context} in context`;
    const doing = lane.state === 0 ? (lane.isReading ? "reading its prompt" : "writing") : STATES[lane.state];
    const mine = this.book.mine.has(lane.number) ? ", from this playground" : "";
    return `${this.classes[lane.class]}, ${doing}: ${lane.written} tokens written, ${lane.context} in context${mine}`;
  }

  // ---- geometry

  #resize() {
    const scale = Math.min(2, devicePixelRatio || 1);
    const width = this.canvas.parentElement.clientWidth;
    if (!width) return;
    // What the panel has; more only if the lanes would become too thin to be seen.
    const stage = this.canvas.parentElement;
    stage.style.minHeight = "";
    const tall = stage.clientHeight;
    this.pitch = Math.max(3, Math.min(28, Math.floor(tall / this.rows)));
    this.gutter = this.pitch >= 14 && width > 600 ? 86 : 12;
    const height = Math.max(tall, this.pitch * this.rows);
    if (height > tall) stage.style.minHeight = `${height}px`;
    this.scale = scale;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    this.canvas.style.height = `${height}px`;
    this.strip.width = this.canvas.width + 64;
    this.strip.height = this.canvas.height;
    this.#redraw();
    this.#copy(); // at once: a canvas of a new size is black until something is drawn
  }

  /** Rows for all lanes that are shown; fewer again when most have stood empty for long. */
  #fitRows() {
    const oldest = this.#now() - this.seconds - 5;
    while (this.frames.length && this.frames[0].to < oldest) this.frames.shift();
    let most = highest(this.frames.at(-1).cells);
    if (most < this.rows) {
      this.quiet = (this.quiet + 1) % 40;
      if (this.quiet) return false;
      for (const { cells } of this.frames) most = Math.max(most, highest(cells));
    }
    const needed = ROWS.find((rows) => rows > most) ?? ROWS.at(-1);
    if (needed === this.rows || (needed < this.rows && most >= this.rows / 3)) return false;
    this.rows = needed;
    this.#resize();
    return true;
  }

  #now() {
    if (this.held !== null) return this.held;
    return performance.now() / 1000 + (this.offset ?? 0) - DELAY;
  }

  /** The strip's unbounded column of a moment, in device pixels. */
  #column(time) {
    return Math.round(time * SPANS[this.span] * this.scale);
  }

  // ---- the strip

  #redraw() {
    if (!this.scale) return;
    this.ink.clearRect(0, 0, this.strip.width, this.strip.height);
    this.cleared = this.#column(this.#now());
    for (const frame of this.frames) this.#paint(frame);
    this.drawnAt = -Infinity;
  }

  /** Empties the strip up to a column: what stood there is a turn of the ring old. */
  #clearTo(column) {
    const width = this.strip.width;
    let from = Math.max(this.cleared, column - width);
    while (from < column) {
      const at = mod(from, width);
      const count = Math.min(column - from, width - at);
      this.ink.clearRect(at, 0, count, this.strip.height);
      from += count;
    }
    this.cleared = Math.max(this.cleared, column);
  }

  #paint(frame) {
    const width = this.strip.width;
    const from = this.#column(frame.from);
    const to = Math.max(from + 1, this.#column(frame.to));
    if (to - from > width || to < this.#column(this.#now()) - width) return;
    this.#clearTo(to);
    const at = mod(from, width);
    this.#paintCells(frame.cells, at, to - from, from);
    if (at + to - from > width) this.#paintCells(frame.cells, at - width, to - from, from);
  }

  #paintCells(cells, x, width, column) {
    const pitch = this.pitch * this.scale;
    const gap = this.pitch >= 12 ? 3 : this.pitch >= 5 ? 2 : 1;
    const height = pitch - gap * this.scale;
    const drawn = width >= 4 * this.scale ? width - this.scale : width;
    for (let i = 0; i < cells.length; i += CELL) {
      if (cells[i] >= this.rows) continue;
      this.#paintCell(cells, i, x, cells[i] * pitch + gap * this.scale / 2, drawn, height, column);
    }
  }

  #paintCell(cells, i, x, y, width, height, column) {
    const ink = this.ink;
    const tone = this.tones[cells[i + 1]];
    const state = cells[i + 2];
    const line = Math.max(1, Math.round(this.scale));
    const middle = Math.round(y + height / 2);
    if (cells[i + 3] > 0) { // a part of the prompt
      ink.fillStyle = tone.full;
      ink.fillRect(x, y, width, height);
    } else if (cells[i + 4] > 0) {
      this.#paintTokens(cells, i, x, y, width, height, tone);
    } else if (state === PAUSED || state === EVICTED) {
      ink.fillStyle = state === PAUSED ? tone.soft : this.alarm;
      const dash = (state === PAUSED ? 5 : 2) * this.scale;
      for (let at = 0; at < width; at += line) {
        if (mod(column + at, 2 * dash) < dash) ink.fillRect(x + at, middle, line, line);
      }
    } else if (state < DONE) { // has its seat, and nothing to do in this step
      ink.fillStyle = tone.faint;
      ink.fillRect(x, middle, width, line);
    }
    if (state === EVICTED && cells[i + 3] + cells[i + 4] > 0) {
      ink.fillStyle = this.alarm;
      ink.fillRect(x + width - 2 * line, y, 2 * line, height);
    }
    if (state >= DONE) { // the last cell of its life
      ink.fillStyle = state === DONE ? tone.full : this.alarm;
      ink.fillRect(x + Math.max(0, width - 2 * line), y, 2 * line, height);
    }
  }

  /** A token is the lower half; drafts stand on it, the accepted ones under the rejected. */
  #paintTokens(cells, i, x, y, width, height, tone) {
    const ink = this.ink;
    const half = Math.max(1, Math.round(height * 0.5));
    const bottom = y + height;
    ink.fillStyle = tone.soft;
    ink.fillRect(x, bottom - half, width, half);
    const drafts = cells[i + 5];
    if (!drafts) return;
    const accepted = Math.round((height - half) * cells[i + 6] / drafts);
    ink.fillStyle = tone.full;
    ink.fillRect(x, bottom - half - accepted, width, accepted);
    ink.fillStyle = this.waste;
    ink.fillRect(x, y, width, height - half - accepted);
  }

  // ---- the view

  #tick(at) {
    requestAnimationFrame((next) => this.#tick(next));
    if (!this.scale || this.offset === null) return;
    const least = STILL.matches ? 500 : this.#isBare() ? 1000 : 0;
    if (at - this.drawnAt < least) return;
    this.drawnAt = at;
    this.#copy();
  }

  /** Is anything of the last seconds to be seen? */
  get hasRecent() {
    return !this.#isBare();
  }

  #isBare() {
    return !this.book.lanes.size && (!this.frames.length || this.frames.at(-1).to < this.#now() - this.seconds);
  }

  #copy() {
    const { view, canvas, strip, scale, colours } = this;
    const now = this.#now();
    const right = this.#column(now);
    this.#clearTo(right);
    view.fillStyle = colours.well;
    view.fillRect(0, 0, canvas.width, canvas.height);
    this.#seconds(now, right);
    const gutter = Math.round(this.gutter * scale);
    const width = canvas.width - gutter - EDGE * scale;
    let from = right - width;
    let x = gutter;
    while (from < right) {
      const at = mod(from, strip.width);
      const count = Math.min(right - from, strip.width - at);
      view.drawImage(strip, at, 0, count, strip.height, x, 0, count, strip.height);
      from += count;
      x += count;
    }
    this.#names(gutter);
  }

  #seconds(now, right) {
    if (this.#isBare()) return;
    const { view, canvas, scale } = this;
    const every = SPANS[this.span] >= 60 ? 1 : 5;
    view.fillStyle = this.colours.line;
    const edge = canvas.width - EDGE * scale;
    for (let second = Math.floor(now / every) * every; ; second -= every) {
      const x = edge - (right - this.#column(second));
      if (x < this.gutter * scale) return;
      view.fillRect(x, 0, 1, canvas.height);
    }
  }

  /** The gutter: the class of whoever has the seat now, and a dot for this page's own. */
  #names(gutter) {
    const { view, scale, pitch } = this;
    view.fillStyle = this.colours.panel;
    view.fillRect(0, 0, gutter - 2 * scale, this.canvas.height);
    const hasNames = this.gutter > 40;
    view.font = `${11 * scale}px system-ui, sans-serif`;
    view.textBaseline = "middle";
    const gap = pitch >= 12 ? 3 : pitch >= 5 ? 2 : 1;
    for (const lane of this.book.seats) {
      if (!lane) continue;
      const top = (lane.seat * pitch + gap / 2) * scale;
      const height = (pitch - gap) * scale;
      view.fillStyle = this.tones[lane.class].full;
      view.fillRect(gutter - 7 * scale, top, 3 * scale, height);
      if (hasNames) {
        view.fillStyle = this.colours.soft;
        view.textAlign = "right";
        view.fillText(this.classes[lane.class], gutter - 13 * scale, top + height / 2 + scale / 2);
      }
      if (this.book.mine.has(lane.number)) {
        view.fillStyle = this.colours.ink;
        view.beginPath();
        view.arc(hasNames ? 4 * scale : 2 * scale, top + height / 2, Math.min(2.5, pitch / 2.5) * scale, 0, 7);
        view.fill();
      }
    }
    if (this.chosen >= 0) {
      view.strokeStyle = this.colours.ink;
      view.lineWidth = scale;
      view.strokeRect(gutter - 2 * scale, this.chosen * pitch * scale + 0.5, this.canvas.width - gutter, pitch * scale - 1);
    }
  }
}

/** The highest seat of a frame. */
function highest(cells) {
  let most = -1;
  for (let i = 0; i < cells.length; i += CELL) if (cells[i] > most) most = cells[i];
  return most;
}

const mod = (value, size) => ((value % size) + size) % size;
