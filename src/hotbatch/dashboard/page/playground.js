// The playground: prompts of any class, one or a burst of many, on the same API as every client.
//
// A browser opens six connections to a server and no more, so a burst is one request with many
// prompts for each class; the engine sees as many requests as there are prompts.

import { events } from "./feed.js";
import { headers } from "./key.js";

const TIERS = { interactive: "priority", standard: "default", batch: "flex" };
const MIX = ["interactive", "standard", "batch", "standard", "interactive"];
const byId = (id) => document.getElementById(id);

const PASSAGE = "A bakery works through the night. The ovens take an hour to become hot and lose little when they are full, so the bakers wait until there is enough dough for all of them, and when a late order comes they put it beside what is in already rather than begin again. ";
const QUESTIONS = [
  "Name three rivers.",
  "What is a batch? One sentence.",
  "Write a short poem about bread.",
  "Why is the sky blue?",
  `Sum this up in two sentences. ${PASSAGE.repeat(3)}`,
  "Explain how a bicycle stays upright.",
  "Tell me a story about a lighthouse.",
  `Which lesson is there for a computer in this story? ${PASSAGE.repeat(6)}`,
  "List five uses for a brick.",
  "How do I boil an egg?",
  `Translate into plain words: ${PASSAGE.repeat(2)}`,
  "What would you ask a ship's captain?",
];

export class Playground {
  constructor() {
    this.hello = null;
    this.prefix = `play-${Math.random().toString(36).slice(2, 8)}`;
    this.sent = 0;
    this.jobs = []; // of the current burst: {class, state, dot}
    this.aborts = new Set();
    this.tokens = new Map(); // message -> ids, or the text where there is no chat template
    byId("play-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.metaKey || event.ctrlKey)) this.send();
    });
  }

  begin(hello) {
    this.hello = hello;
    this.tokens.clear();
  }

  /** Is a request of this id one of ours? */
  owns(id) {
    return id.startsWith(`cmpl-${this.prefix}`);
  }

  stop() {
    for (const abort of this.aborts) abort.abort();
  }

  async send() {
    const form = new FormData(byId("play-form"));
    const count = Number(form.get("count"));
    const kind = form.get("class");
    const prompt = byId("prompt").value.trim();
    const field = byId("max-tokens");
    const maxTokens = Number(field.value);
    if (!this.hello || !field.reportValidity() || !maxTokens) return;

    const jobs = Array.from({ length: count }, (_, i) => ({
      class: kind === "mixed" ? MIX[(this.sent + i) % MIX.length] : kind,
      prompt: prompt || QUESTIONS[(this.sent + i) % QUESTIONS.length],
      state: "waiting",
      sentAt: performance.now(),
      firstAfter: null,
      text: "",
    }));
    this.sent += count;
    this.#show(jobs);
    const classes = Object.keys(TIERS).filter((name) => jobs.some((job) => job.class === name));
    await Promise.all(classes.map((name) => this.#request(jobs.filter((job) => job.class === name), name, maxTokens)));
    this.#tell();
  }

  async #request(jobs, serviceClass, maxTokens) {
    const abort = new AbortController();
    this.aborts.add(abort);
    byId("stop").disabled = false;
    try {
      const prompts = [];
      for (const job of jobs) prompts.push(this.#fit(await this.#encode(job.prompt, abort.signal), job, maxTokens));
      const answer = await this.#post("/v1/completions", {
        prompt: prompts,
        service_tier: TIERS[serviceClass],
        max_tokens: maxTokens,
        temperature: 0.8,
        stream: true,
        request_id: `${this.prefix}-${crypto.getRandomValues(new Uint32Array(1))[0].toString(36)}`,
      }, abort.signal);
      for await (const { data } of events(answer.body)) {
        if (data.error) throw new Error(data.error.message);
        for (const choice of data.choices ?? []) this.#hear(jobs[choice.index], choice);
      }
    } catch (error) {
      if (error.name !== "AbortError") this.problem = error.message;
    } finally {
      for (const job of jobs) if (job.state !== "done") this.#mark(job, "failed");
      this.aborts.delete(abort);
      byId("stop").disabled = !this.aborts.size;
    }
  }

  /** The chat template is the server's affair: it renders, and we send tokens. */
  async #encode(message, signal) {
    if (!this.hello.has_chat) return message;
    if (!this.tokens.has(message)) {
      const answer = await this.#post("/tokenize", { messages: [{ role: "user", content: message }] }, signal);
      this.tokens.set(message, (await answer.json()).tokens);
    }
    return this.tokens.get(message);
  }

  /** Our own questions are made to fit a small context; what somebody wrote is not cut. */
  #fit(tokens, job, maxTokens) {
    const room = this.hello.context_len - maxTokens;
    return QUESTIONS.includes(job.prompt) && room > 0 ? tokens.slice(0, room) : tokens;
  }

  async #post(path, body, signal) {
    const answer = await fetch(path, {
      method: "POST",
      headers: headers({ "content-type": "application/json" }),
      body: JSON.stringify(body),
      signal,
    });
    if (answer.ok) return answer;
    const told = await answer.json().catch(() => null);
    throw new Error(told?.error?.message ?? `The server answered ${answer.status}.`);
  }

  #hear(job, choice) {
    if (!job) return;
    if (choice.text && job.firstAfter === null) {
      job.firstAfter = performance.now() - job.sentAt;
      this.#mark(job, "writing");
    }
    job.text += choice.text ?? "";
    if (choice.finish_reason) this.#mark(job, choice.finish_reason === "abort" ? "failed" : "done");
    this.#tell();
  }

  // ---- what is seen

  #show(jobs) {
    this.jobs = jobs;
    this.problem = "";
    byId("dots").replaceChildren(...(jobs.length > 1 ? jobs : []).map((job) => {
      job.dot = document.createElement("i");
      job.dot.dataset.class = job.class;
      return job.dot;
    }));
    const answer = byId("answer");
    answer.hidden = false;
    answer.textContent = "";
    this.#tell();
  }

  #mark(job, state) {
    job.state = state;
    if (job.dot) job.dot.dataset.state = state;
  }

  /** At most once a frame of the screen, however many tokens come. */
  #tell() {
    if (this.isDue) return;
    this.isDue = true;
    requestAnimationFrame(() => {
      this.isDue = false;
      this.#tellNow();
    });
  }

  #tellNow() {
    const { jobs } = this;
    const count = (state) => jobs.filter((job) => job.state === state).length;
    const firsts = jobs.map((job) => job.firstAfter).filter((value) => value !== null).sort((a, b) => a - b);
    const parts = [`${jobs.length} sent`];
    for (const state of ["waiting", "writing", "done"]) if (count(state)) parts.push(`${count(state)} ${state}`);
    if (count("failed")) parts.push(`${count("failed")} cut`);
    if (firsts.length) parts.push(`first token after ${(firsts[firsts.length >> 1] / 1000).toFixed(2)} s`);
    const tally = byId("tally");
    tally.classList.toggle("wrong", Boolean(this.problem));
    tally.textContent = this.problem || parts.join(" · ");
    const answer = byId("answer");
    const shown = jobs.findLast((job) => job.text) ?? jobs[0];
    const atEnd = answer.scrollTop + answer.clientHeight > answer.scrollHeight - 20;
    answer.textContent = jobs.length === 1 ? shown.text || "…" : jobs[0].text || "…";
    if (atEnd) answer.scrollTop = answer.scrollHeight;
  }
}
