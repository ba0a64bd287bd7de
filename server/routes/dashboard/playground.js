// The playground: one streamed request, its samples side by side.

import { forget, goOn, messages, settle } from "./chat.js";
import { amount, byId, count, duration } from "./show.js";

const NUMBERS = ["n", "max_tokens", "temperature", "top_p", "top_k", "min_p"];

let running = null; // the AbortController of the request under way

/** Connect the form. `headers` gives what every request carries. */
export function play(headers) {
  const form = byId("form");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running) run(headers());
  });
  form.addEventListener("change", ({ target }) => target.name === "mode" && showMode());
  byId("new-chat").addEventListener("click", () => {
    forget();
    clear();
  });
  showMode(); // a browser may restore what was chosen before
  byId("cancel").addEventListener("click", () => running?.abort());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && form.contains(event.target)) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
}

const isChat = () => byId("form").elements.mode.value === "chat";

/** Show what the chosen route wants. */
function showMode() {
  for (const part of document.querySelectorAll("[data-mode]")) {
    part.hidden = (part.dataset.mode === "chat") !== isChat();
  }
  running?.abort();
  settle();
  clear();
}

/** No samples, and nothing said of them. */
function clear() {
  byId("samples").replaceChildren();
  byId("progress").textContent = "";
  byId("error").hidden = true;
}

/** The request as JSON. A seed may be larger than a JavaScript number: it goes as it is written. */
function body() {
  const fields = Object.fromEntries(NUMBERS.map((name) => [name, Number(byId(name).value)]));
  const stop = byId("stop").value.split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n"));
  const json = JSON.stringify({
    ...(isChat() ? { messages: messages() } : { prompt: byId("prompt").value }),
    ...fields,
    ...(stop.length && { stop }),
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  });
  const seed = byId("seed").value.trim();
  return seed ? `${json.slice(0, -1)},"seed":${seed}}` : json;
}

async function run(headers) {
  const path = isChat() ? "v1/chat/completions" : "v1/completions";
  const asked = byId(isChat() ? "message" : "prompt").value;
  const samples = new Samples(Number(byId("n").value));
  running = new AbortController();
  setBusy(true);
  byId("error").hidden = true;
  announce("Running");
  try {
    const reply = await fetch(new URL(path, document.baseURI), {
      method: "POST",
      headers: { "Content-Type": "application/json", ...headers },
      body: body(),
      signal: running.signal,
    });
    if (!reply.ok) throw new Error(await reason(reply));
    if (isChat()) goOn(asked, samples.show(""));
    else samples.show(asked);
    for await (const event of events(reply.body)) {
      if (event.error) throw new Error(said(event.error));
      samples.add(event);
    }
    samples.finish();
    announce(byId("progress").textContent);
  } catch (error) {
    const isStopped = error.name === "AbortError";
    samples.finish(isStopped ? "stopped" : "failed");
    if (isStopped) announce("Stopped");
    else complain(error instanceof TypeError ? "The server cannot be reached." : error.message);
  } finally {
    running = null;
    setBusy(false);
  }
}

/** The JSON documents of a stream of server-sent events, up to [DONE]. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("The stream ended early: the server or the connection is gone.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

/** One line of an error of the API. */
function said({ message, param }) {
  return param && !message.startsWith(param) ? `${param}: ${message}` : message;
}

async function reason(reply) {
  try {
    return `${reply.status}: ${said((await reply.json()).error)}`;
  } catch {
    return `The server answered ${reply.status} ${reply.statusText}`;
  }
}

function complain(message) {
  byId("error").textContent = message;
  byId("error").hidden = false;
  if (message.startsWith("401")) byId("key").focus();
}

/** For those who do not see the page: beginnings and ends, not every token. */
function announce(message) {
  byId("announcement").textContent = message;
}

function setBusy(isBusy) {
  const hadFocus = document.activeElement === byId(isBusy ? "run" : "cancel");
  byId("run").disabled = isBusy;
  byId("cancel").disabled = !isBusy;
  byId("samples").setAttribute("aria-busy", isBusy);
  if (hadFocus) byId(isBusy ? "cancel" : "run").focus(); // a disabled button would lose it
}

/** The samples of one request. Text is drawn once a frame, however many events came. */
class Samples {
  constructor(n) {
    this.started = performance.now();
    this.firstAfter = undefined;
    this.tokens = 0;
    this.waiting = false;
    this.n = n;
    this.cards = [];
    if (!isChat()) clear(); // a chat's replies are what its next question goes on from
  }

  /** A card for each, now that the server has taken the request. */
  show(prompt) {
    this.cards = Array.from({ length: this.n }, (_, index) => card(prompt, index));
    byId("samples").replaceChildren(...this.cards.map(({ element }) => element));
    return this.cards;
  }

  add(event) {
    this.firstAfter ??= performance.now() - this.started;
    this.tokens = event.usage?.completion_tokens ?? this.tokens;
    for (const choice of event.choices) {
      const one = this.cards[choice.index];
      one.fresh += choice.text ?? choice.delta.content ?? "";
      one.reason = choice.finish_reason ?? one.reason;
    }
    if (!this.waiting) {
      this.waiting = true;
      requestAnimationFrame(() => this.draw());
    }
  }

  draw() {
    this.waiting = false;
    for (const one of this.cards) {
      if (one.fresh) one.text.appendData(one.fresh);
      one.fresh = "";
      if (one.reason) one.status.textContent = one.reason;
    }
    const seconds = (performance.now() - this.started) / 1000;
    const ended = this.cards.filter(({ reason: why }) => why).length;
    byId("progress").textContent =
      `${ended} of ${this.cards.length} samples ended · ${count(this.tokens)} tokens in ` +
      `${duration(seconds)} · ${amount(this.tokens / seconds)} tokens a second · first after ` +
      duration(this.firstAfter === undefined ? undefined : this.firstAfter / 1000);
  }

  /** Say of those that have not ended why they never will. */
  finish(why = "") {
    if (!this.cards.length) return;
    for (const one of this.cards) one.reason ||= why;
    this.draw();
  }
}

function card(prompt, index) {
  const element = document.createElement("article");
  element.className = "card sample";
  element.setAttribute("aria-label", `Sample ${index + 1}`);
  const head = document.createElement("h3");
  const status = document.createElement("span");
  status.textContent = "…";
  head.append(`Sample ${index + 1}`, status);
  const given = document.createElement("span");
  given.className = "given";
  given.textContent = prompt;
  const text = document.createTextNode("");
  const paragraph = document.createElement("p");
  paragraph.append(given, text);
  element.append(head, paragraph);
  return { element, status, text, fresh: "", reason: "" };
}
