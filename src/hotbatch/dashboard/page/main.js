// Joins the page's parts: the stream goes to the lanes and the panels, hands go to the controls.

import { watch } from "./feed.js";
import { askKey } from "./key.js";
import { LaneBook } from "./lane_book.js";
import { Lanes } from "./lanes.js";
import { Panels } from "./panels.js";
import { Playground } from "./playground.js";

const byId = (id) => document.getElementById(id);
const CLASSES = ["batch", "standard", "interactive", "ahead"]; // as the hello has them, and guesses

const book = new LaneBook();
const lanes = new Lanes(byId("lanes"), book, CLASSES);
const panels = new Panels();
const playground = new Playground();
const REST = 1.1; // seconds between two frames while nothing is asked, and a little
let boot = null;
let lastTime = -Infinity; // of the last frame

watch({ onHello, onFrame, onState, askKey });

function onHello(hello) {
  if (hello.boot !== boot) { // another process: its clock and its requests are others
    lanes.clear();
    lastTime = -Infinity;
    boot = hello.boot;
  }
  book.clear();
  panels.begin(hello);
  playground.begin(hello);
  showWindow();
}

function onFrame(frame) {
  lanes.add(frame.t, frame.span ?? spanOfGuesses(frame), book.take(frame, (id) => playground.owns(id)));
  lastTime = frame.t;
  if (frame.ahead) panels.noteAhead();
  panels.steps(frame.points);
  if (!frame.gauges) return;
  panels.gauges(frame.t, frame.gauges);
  byId("empty").classList.toggle("shown", !book.lanes.size && !lanes.hasRecent);
  const { healthy, accepting } = frame.gauges;
  setStatus(!healthy ? "ill" : accepting ? "live" : "draining", !healthy ? "the model's steps fail" : accepting ? "live" : "shutting down");
}

/** Steps that nobody asked for are in no span; the guesses worked since the last frame. */
function spanOfGuesses(frame) {
  return frame.ahead ? [Math.max(lastTime, frame.t - REST), frame.t] : null;
}

function onState(state, detail) {
  if (state === "lost") setStatus("lost", detail || "no connection, trying again");
  else if (state === "connecting" && !boot) setStatus("connecting", "connecting");
  else if (state === "live") setStatus("live", "live");
  if (state === "lost") {
    book.clear();
    byId("empty").classList.remove("shown");
  }
}

function setStatus(state, words) {
  const status = byId("status");
  status.dataset.state = state;
  if (status.textContent !== words) status.textContent = words;
}

// ---- the picture's controls

function hold(isHeld) {
  byId("freeze").setAttribute("aria-pressed", String(isHeld));
  lanes.hold(isHeld);
}

function zoom(by) {
  lanes.zoom(by);
  showWindow();
}

function showWindow() {
  byId("window").textContent = `The last ${Math.round(lanes.seconds)} seconds.`;
}

const isHeld = () => byId("freeze").getAttribute("aria-pressed") === "true";
byId("freeze").addEventListener("click", () => hold(!isHeld()));
byId("wider").addEventListener("click", () => zoom(-1));
byId("closer").addEventListener("click", () => zoom(1));
addEventListener("resize", showWindow);

// ---- one lane: by mouse, by finger, by key

const canvas = byId("lanes");
canvas.addEventListener("pointermove", (event) => point(lanes.seatAt(event.offsetY), event.offsetX));
canvas.addEventListener("pointerdown", (event) => point(lanes.seatAt(event.offsetY), event.offsetX));
canvas.addEventListener("pointerleave", () => point(-1));
canvas.addEventListener("blur", () => point(-1));
canvas.addEventListener("keydown", (event) => {
  const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (by) {
    event.preventDefault();
    const taken = book.seats.flatMap((lane, seat) => (lane ? [seat] : []));
    if (!taken.length) return;
    const next = by > 0 ? taken.find((seat) => seat > lanes.chosen) ?? taken[0] : taken.findLast((seat) => seat < lanes.chosen) ?? taken.at(-1);
    point(next, canvas.clientWidth / 2);
    byId("lane-said").textContent = lanes.say(next);
  } else if (event.key === "Escape") point(-1);
  else if (event.key === "+" || event.key === "=") zoom(1);
  else if (event.key === "-") zoom(-1);
});

function point(seat, x = 0) {
  const words = seat < 0 ? "" : lanes.say(seat);
  lanes.chosen = words ? seat : -1;
  const tip = byId("tip");
  tip.hidden = !words;
  if (!words) return;
  tip.textContent = words;
  const room = canvas.clientWidth - tip.offsetWidth - 8;
  tip.style.left = `${Math.max(8, Math.min(room, x + 12))}px`;
  tip.style.top = `${lanes.topOf(seat) + lanes.pitch + 6}px`;
}

setInterval(() => {
  if (lanes.chosen >= 0 && !byId("tip").hidden) byId("tip").textContent = lanes.say(lanes.chosen) || "left";
}, 500);

// ---- theme and shortcuts

const THEMES = ["auto", "light", "dark"];
showTheme();

function setTheme(next) {
  window.hotbatchTheme.choose(next);
  showTheme();
  restyle();
}

function showTheme() {
  const theme = window.hotbatchTheme.choice;
  byId("theme").textContent = theme;
  byId("theme").setAttribute("aria-label", `Theme: ${theme === "auto" ? "as the system" : theme}`);
}

function restyle() {
  lanes.restyle();
  panels.restyle();
}

const nextTheme = () => setTheme(THEMES[(THEMES.indexOf(window.hotbatchTheme.choice) + 1) % THEMES.length]);
byId("theme").addEventListener("click", nextTheme);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", restyle);

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("key-dialog").open) return;
  if (event.target.closest("input:not([type=radio]), textarea")) return;
  if (event.key === "p") byId("prompt").focus();
  else if (event.key === "l") canvas.focus();
  else if (event.key === "t") nextTheme();
  else if (event.key === " " && !event.target.closest("button, input")) hold(!isHeld());
  else return;
  event.preventDefault();
});
