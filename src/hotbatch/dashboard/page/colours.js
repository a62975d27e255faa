// The sheet's variables as values that a canvas can use.

export function palette() {
  const style = getComputedStyle(document.documentElement);
  const get = (name) => style.getPropertyValue(`--${name}`).trim();
  const names = ["paper", "panel", "ink", "soft", "faint", "line", "well", "interactive", "standard", "batch", "alarm", "host", "ahead", "rest",
    "cause-few", "cause-seats", "cause-kv", "cause-prompts", "cause-drafts", "cause-kernels"];
  return Object.fromEntries(names.map((name) => [name, get(name)]));
}

/** `share` of one #rrggbb colour, the rest of another. */
export function mix(colour, other, share) {
  const a = channels(colour);
  const b = channels(other);
  return `rgb(${a.map((value, i) => Math.round(value * share + b[i] * (1 - share))).join(" ")})`;
}

function channels(colour) {
  return [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
}
