// The playground: one streamed request, its samples side by side or counted.

import { forget, goOn, settle } from "./chat.js";
import { body, fill, isChat, isCounted, path, showPrograms } from "./request.js";
import { announce, Answers, Cards } from "./samples.js";
import { byId } from "./show.js";

let running = null; // the AbortController of the request under way

/** Connect the form. `headers` gives what every request carries. */
export function play(headers) {
  const form = byId("form");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running) run(headers());
  });
  form.addEventListener("change", ({ target }) => target.name === "mode" && showMode());
  form.addEventListener("input", showPrograms);
  byId("new-chat").addEventListener("click", () => {
    forget();
    clear();
  });
  showMode(); // a browser may restore what was chosen before
  fillIn();
  byId("cancel").addEventListener("click", () => running?.abort());
  addEventListener("pagehide", () => running?.abort());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && form.contains(event.target)) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
}

/** Begin with the request that the model's folder has for it. */
async function fillIn() {
  try {
    fill(await (await fetch(new URL("dashboard/example.json", document.baseURI))).json());
  } catch {
    return; // what the page has stays
  } finally {
    showPrograms();
  }
}

/** Show what the chosen route wants. */
function showMode() {
  for (const part of document.querySelectorAll("[data-mode]")) {
    part.hidden = (part.dataset.mode === "chat") !== isChat();
  }
  running?.abort();
  settle();
  clear();
  showPrograms();
}

/** No samples, and nothing said of them. */
function clear() {
  byId("samples").replaceChildren();
  byId("progress").textContent = "";
  forgive();
}

/** Nothing is wrong, or not any more. */
function forgive() {
  byId("error").hidden = true;
  byId("form").after(byId("error"));
  for (const field of byId("form").querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
}

async function run(headers) {
  const asked = byId(isChat() ? "message" : "prompt").value;
  const samples = new (isCounted() ? Answers : Cards)(Number(byId("n").value) || 1);
  if (!isChat()) clear(); // a chat's replies are what its next question goes on from
  running = new AbortController();
  setBusy(true);
  forgive();
  showPrograms();
  announce("Running");
  try {
    const reply = await fetch(new URL(path(), document.baseURI), {
      method: "POST",
      headers: { "Content-Type": "application/json", ...headers },
      body: body(),
      signal: running.signal,
    });
    if (!reply.ok) throw await reason(reply);
    if (isChat()) goOn(asked, samples.show(""));
    else samples.show(asked);
    for await (const event of events(reply.body)) {
      if (event.error) throw told(event.error);
      samples.add(event);
    }
    samples.finish();
    announce(byId("progress").textContent);
  } catch (error) {
    const isStopped = error.name === "AbortError";
    samples.finish(isStopped ? "stopped" : "failed");
    if (isStopped) announce("Stopped");
    else complain(error instanceof TypeError ? "The server cannot be reached." : error.message, error.param);
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

/** An error of the API, in one line. */
function told({ message, param }, status = "") {
  const place = param && !message.startsWith(param) ? `${param}: ` : "";
  return Object.assign(new Error(status + place + message), { param });
}

async function reason(reply) {
  try {
    return told((await reply.json()).error, `${reply.status}: `);
  } catch {
    return new Error(`The server answered ${reply.status} ${reply.statusText}`);
  }
}

/** Say what is wrong, below the field that it is about if there is one. */
function complain(message, param) {
  const field = byId(String(param).split(/\W/)[0]);
  if (field?.classList.contains("asked")) {
    (field.closest("label") ?? field).after(byId("error"));
    field.setAttribute("aria-invalid", "true");
    field.setAttribute("aria-errormessage", "error");
    field.focus();
  }
  byId("error").textContent = message;
  byId("error").hidden = false;
  if (message.startsWith("401")) byId("key").focus();
}

function setBusy(isBusy) {
  const hadFocus = document.activeElement === byId(isBusy ? "run" : "cancel");
  byId("run").disabled = isBusy;
  byId("cancel").disabled = !isBusy;
  byId("samples").setAttribute("aria-busy", isBusy);
  if (hadFocus) byId(isBusy ? "cancel" : "run").focus(); // a disabled button would lose it
}
