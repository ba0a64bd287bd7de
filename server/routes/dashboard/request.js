// The request that the form makes, as it is sent and as curl and Python write it.

import { messages } from "./chat.js";
import { byId } from "./show.js";

export const MOST_CARDS = 64; // samples that are shown side by side; more are counted
const FIELDS = ["n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "until", "verify"];
const STREAM_OPTIONS = '{"include_usage": true, "continuous_usage_stats": true}';
const BEYOND_OPENAI = ["top_k", "min_p", "until", "verify", "stream_whole"]; // its SDK has no arguments of these names
const CONSTANTS = { true: "True", false: "False", null: "None" };

const written = (id) => byId(id).value.trim();
export const isChat = () => byId("form").elements.mode.value === "chat";
export const path = () => (isChat() ? "v1/chat/completions" : "v1/completions");

/** Whether samples come whole: they are judged, or too many to be watched. */
export const isCounted = () => Number(written("n")) > MOST_CARDS || Boolean(written("until") || written("verify"));

/** Text as the JSON that it is, with all digits. Other text becomes a string: the server says what is wrong with it. */
function json(text) {
  try {
    JSON.parse(text);
    return text;
  } catch {
    return JSON.stringify(text);
  }
}

/** The request's fields, each as [name, JSON]. What is left empty is left out. */
function fields() {
  const prompt = byId("prompt");
  const stop = byId("stop").value.split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n"));
  return [
    ...(byId("model").dataset.known ? [["model", JSON.stringify(byId("model").textContent)]] : []),
    isChat() ? ["messages", JSON.stringify(messages())]
      : ["prompt", prompt.dataset.ids ? json(prompt.value) : JSON.stringify(prompt.value)],
    ...FIELDS.filter(written).map((name) => [name, json(written(name))]),
    ...(stop.length ? [["stop", JSON.stringify(stop)]] : []),
    ["stream", "true"],
    ...(isCounted() ? [["stream_whole", "true"]] : []),
    ["stream_options", STREAM_OPTIONS],
  ];
}

const asObject = (some) => `{${some.map(([name, value]) => `"${name}": ${value}`).join(", ")}}`;
export const body = () => asObject(fields());

/** Show the same request as programs send it. */
export function showPrograms() {
  const url = new URL(path(), document.baseURI).href;
  const key = byId("key").value ? "YOUR KEY" : "";
  const quoted = `'${body().replaceAll("'", "'\\''")}'`;
  byId("curl").textContent = `curl -N ${url} -H 'Content-Type: application/json' ` +
    `${key && `-H 'Authorization: Bearer ${key}' `}-d ${quoted}`;
  const isOwn = ([name]) => BEYOND_OPENAI.includes(name);
  const given = fields().filter((field) => !isOwn(field)).map(([name, value]) => `    ${name}=${python(value)},\n`);
  const route = isChat() ? "chat.completions" : "completions";
  byId("python").textContent = "import openai\n\n" +
    `client = openai.OpenAI(base_url="${new URL("v1", document.baseURI).href}", api_key="${key || "none"}")\n` +
    `stream = client.${route}.create(\n${given.join("")}` +
    `    extra_body=${python(asObject(fields().filter(isOwn)))},\n)\nfor event in stream:\n    print(event)`;
}

/** JSON as an expression of Python: its strings are the same, its constants are not. */
const python = (value) => value.replace(/"(?:[^"\\]|\\.)*"|true|false|null/g,
  (part) => CONSTANTS[part] ?? JSON.stringify(JSON.parse(part)));

/** Fill the form with a model's example, and offer its strings if the prompt is made of those it accepts. */
export function fill(example) {
  const text = (value) => (typeof value === "string" ? value : JSON.stringify(value));
  const { prompt, stop = [], verify } = example;
  const isOne = typeof prompt === "string" || (Array.isArray(prompt) && prompt.every(Number.isInteger));
  if (!isOne || ![stop].flat().every((one) => typeof one === "string")) return; // no field has it
  byId("prompt").dataset.ids = typeof prompt === "string" ? "" : "yes";
  byId("prompt").value = text(prompt);
  byId("stop").value = [stop].flat().map((one) => one.replaceAll("\n", "\\n")).join("\n");
  for (const name of FIELDS) byId(name).value = text(example[name] ?? "");
  if (Array.isArray(verify?.accepts) && Array.isArray(verify.rejects)) offerStrings(String(prompt), verify);
}

function offerStrings(prompt, verify) {
  const { accepts, rejects } = verify;
  const mark = prompt.slice(0, Math.max(0, prompt.indexOf(accepts[0])));
  const joined = (strings) => strings.map((string) => mark + string).join("");
  const isHeld = !prompt.startsWith(joined(accepts));
  const shown = joined(isHeld ? accepts.slice(0, -1) : accepts);
  if (!shown || !prompt.startsWith(shown)) return; // it is not made of them
  const end = prompt.slice(shown.length);
  const lines = (id) => byId(id).value.split("\n").filter(Boolean);
  byId("accepts").value = accepts.join("\n");
  byId("rejects").value = rejects.join("\n");
  byId("held").checked = isHeld;
  byId("strings").hidden = false;
  byId("strings").addEventListener("input", () => {
    const strings = lines("accepts");
    byId("prompt").value = joined(byId("held").checked ? strings.slice(0, -1) : strings) + end;
    byId("verify").value = JSON.stringify({ ...verify, accepts: strings, rejects: lines("rejects") });
  });
}
