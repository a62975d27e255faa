// The live stream: connects, reads events, comes again after whatever ended it.
//
// EventSource cannot send a key, so the stream is read with fetch. While the tab is hidden for
// long, the stream is closed: a page that nobody sees should cost the server nothing.

import { forgetKey, headers } from "./key.js";

const RETRY_MS = [300, 600, 1200, 2500, 5000];
const SILENCE_MS = 8000; // the server says something every second
const HIDDEN_MS = 60_000;

/**
 * @param {{
 *   onHello: (hello: object) => void,
 *   onFrame: (frame: object) => void,
 *   onState: (state: "connecting" | "live" | "lost", detail?: string) => void,
 *   askKey: (isWrong: boolean) => Promise<void>,
 * }} listener
 */
export async function watch(listener) {
  let failures = 0;
  let hadKey = false;
  for (;;) {
    await untilSeen();
    listener.onState("connecting");
    const outcome = await readOnce(listener);
    if (outcome === "key") {
      forgetKey();
      await listener.askKey(hadKey);
      hadKey = true;
      continue;
    }
    failures = outcome === "read" ? 0 : failures + 1;
    listener.onState("lost", outcome === "full" ? "too many pages watch" : "");
    await sleep(RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]);
  }
}

/** One connection to its end: "read" if anything came, "key", "full", or "failed". */
async function readOnce(listener) {
  const abort = new AbortController();
  const unhook = abortWhenHidden(abort);
  let outcome = "failed";
  let watchdog = 0;
  const alive = () => {
    clearTimeout(watchdog);
    watchdog = setTimeout(() => abort.abort(), SILENCE_MS);
  };
  try {
    alive();
    const answer = await fetch("/live", { headers: headers(), signal: abort.signal, cache: "no-store" });
    if (answer.status === 401) return "key";
    if (answer.status === 429) return "full";
    if (!answer.ok) return "failed";
    for await (const { name, data } of events(answer.body)) {
      alive();
      outcome = "read";
      if (name === "hello") {
        listener.onState("live");
        listener.onHello(data);
      } else {
        listener.onFrame(data);
      }
    }
  } catch (error) {
    if (!(error instanceof TypeError) && error.name !== "AbortError") throw error;
  } finally {
    clearTimeout(watchdog);
    unhook();
  }
  return outcome;
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      let name = "";
      let text = "";
      for (const line of part.split("\n")) {
        if (line.startsWith("event: ")) name = line.slice(7);
        else if (line.startsWith("data: ")) text += line.slice(6);
      }
      if (text && text !== "[DONE]") yield { name, data: JSON.parse(text) };
    }
  }
}

export { events };

function abortWhenHidden(abort) {
  let timer = 0;
  const look = () => {
    clearTimeout(timer);
    if (document.hidden) timer = setTimeout(() => abort.abort(), HIDDEN_MS);
  };
  document.addEventListener("visibilitychange", look);
  look();
  return () => {
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", look);
  };
}

function untilSeen() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => {
    document.addEventListener("visibilitychange", function look() {
      if (document.hidden) return;
      document.removeEventListener("visibilitychange", look);
      resolve();
    });
  });
}

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
