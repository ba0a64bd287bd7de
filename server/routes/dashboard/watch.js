// The numbers: /metrics once a second, as rates, gauges and percentiles.

import { buckets, parse, quantile, since, size, total } from "./prometheus.js";
import { amount, byId, count, curve, duration, put } from "./show.js";

const PERIOD_MS = 1000;
const HISTORY = 120; // seconds in a curve, at most
const LEAST = 10; // and at least
const WINDOW = 60; // seconds that percentiles look back
const SMOOTH = 3; // readings that a rate looks back
const TABLE = {
  "first-token": "srm_engine_time_to_first_token_seconds",
  "inter-token": "srm_engine_inter_token_latency_seconds",
  "step-time": "srm_engine_step_seconds",
  "whole-sequence": "srm_engine_sequence_seconds",
};
const NAMES = [
  "srm_engine_decode_tokens_total", "srm_engine_prefill_tokens_total", "srm_engine_steps_total",
  "srm_engine_running_sequences", "srm_engine_waiting_sequences", "srm_engine_num_slots",
  "srm_engine_slot_usage", "srm_engine_batch_rows", "http_requests_total", ...Object.values(TABLE),
  "srm_engine_up", "srm_engine_info", "srm_weights_version", "srm_batches",
];

const isAsked = ({ handler }) => handler.startsWith("/v1/");
const isError = ({ handler, status }) => isAsked({ handler }) && Number(status) >= 400;
const COUNTERS = {
  tokens: (samples) => total(samples, "srm_engine_decode_tokens_total"),
  prefill: (samples) => total(samples, "srm_engine_prefill_tokens_total"),
  steps: (samples) => total(samples, "srm_engine_steps_total"),
  stepSeconds: (samples) => total(samples, "srm_engine_step_seconds_sum"),
  rows: (samples) => total(samples, "srm_engine_batch_rows_sum"),
  requests: (samples) => total(samples, "http_requests_total", isAsked) ?? 0,
  errors: (samples) => total(samples, "http_requests_total", isError) ?? 0,
};

const ENDED = ["completed", "failed", "expired", "cancelled"]; // what a batch's status may be in the end

const readings = []; // {at, counters, histograms}, newest last
const curves = { tokens: [], running: [], step: [], requests: [] }; // of {at, value}

/** Fetch, show, and again: for as long as the page is open, but only while it is looked at. */
export async function watch(headers) {
  const url = new URL("metrics", document.baseURI);
  for (const name of NAMES) url.searchParams.append("name[]", name);
  for (;;) {
    const started = performance.now();
    if (!document.hidden) await read(url, headers());
    const left = PERIOD_MS - (performance.now() - started);
    await new Promise((resolve) => setTimeout(resolve, Math.max(left, 100)));
  }
}

async function read(url, headers) {
  const problem = byId("metrics-error");
  try {
    const reply = await fetch(url, { headers, cache: "no-store" });
    if (!reply.ok) throw new Error(`/metrics answers ${reply.status}`);
    show(parse(await reply.text()));
    problem.hidden = true;
  } catch (error) {
    const isAway = error instanceof TypeError;
    problem.textContent = isAway ? "The server cannot be reached; trying again." : error.message;
    problem.hidden = false;
    forget();
  }
}

/** Nothing is known of now; the curves stay, as of before. */
function forget() {
  readings.length = 0;
  for (const one of document.querySelectorAll(".number, tbody td")) one.textContent = "–";
  byId("occupancy-bar").style.width = "0";
  byId("errors").parentElement.classList.remove("trouble");
  byId("numbers").classList.add("stale");
}

function show(samples) {
  byId("numbers").classList.remove("stale");
  const counters = Object.entries(COUNTERS).map(([name, get]) => [name, get(samples)]);
  const histograms = Object.entries(TABLE).map(([id, name]) => [id, buckets(samples, name)]);
  readings.push({
    at: performance.now() / 1000,
    counters: Object.fromEntries(counters),
    histograms: Object.fromEntries(histograms),
  });
  const now = readings.at(-1);
  dropBefore(readings, now.at - WINDOW);
  const running = total(samples, "srm_engine_running_sequences");
  const steps = grown("steps");
  const step = steps ? grown("stepSeconds") / steps : undefined;
  const rates = { tokens: rate("tokens"), requests: rate("requests") };

  put("tokens", amount(rates.tokens));
  put("prefill", amount(rate("prefill")));
  put("total", count(now.counters.tokens));
  put("running", count(running));
  put("waiting", count(total(samples, "srm_engine_waiting_sequences")));
  put("requests", amount(rates.requests));
  put("errors", amount(rate("errors")));
  byId("errors").parentElement.classList.toggle("trouble", rate("errors") > 0);
  put("step", duration(step));
  put("rows", amount(steps ? grown("rows") / steps : undefined));
  showPool(samples, running);
  showServer(samples);
  draw("tokens", rates.tokens);
  draw("running", running);
  draw("step", step ?? 0);
  draw("requests", rates.requests);
  for (const id of Object.keys(TABLE)) showPercentiles(id, now);
}

function showPool(samples, running) {
  const slots = total(samples, "srm_engine_num_slots");
  const usage = slots ? running / slots : undefined;
  const percent = usage === undefined ? 0 : 100 * usage;
  const isTrace = percent > 0 && percent < 0.1;
  put("occupancy", usage === undefined ? "–" : isTrace ? "< 0.1 %" : `${amount(percent)} %`);
  put("slots", `${count(running)} of ${count(slots)} slots`);
  byId("occupancy-bar").style.width = `${percent}%`;
}

function showServer(samples) {
  const values = (name) => (samples.get(name) ?? []).map(({ value }) => value);
  const engines = values("srm_engine_up");
  const devices = new Set(samples.get("srm_engine_info")?.map(({ labels }) => labels.device));
  const versions = values("srm_weights_version");
  const hasEnded = ({ status }) => ENDED.includes(status);
  const ended = total(samples, "srm_batches", hasEnded);
  put("engines", engines.length ? `${engines.filter(Boolean).length} of ${engines.length}` : "–");
  put("device", [...devices].join(", ") || "–");
  put("weights", count(versions.length ? Math.max(...versions) : undefined));
  put("batches", count(total(samples, "srm_batches", (labels) => !hasEnded(labels))));
  put("batches-ended", count(ended));
}

function showPercentiles(id, now) {
  const histogram = since(now.histograms[id], readings[0].histograms[id]);
  const cells = byId(id).querySelectorAll("td");
  [0.5, 0.95, 0.99].forEach((q, place) => {
    cells[place].textContent = duration(quantile(histogram, q));
  });
  cells[3].textContent = count(size(histogram));
}

/** Of things with a time, let the old ones go. */
function dropBefore(things, time) {
  things.splice(0, things.findIndex(({ at }) => at >= time));
}

function draw(name, value) {
  const { at } = readings.at(-1);
  if (value !== undefined) curves[name].push({ at, value });
  dropBefore(curves[name], at - HISTORY);
  const age = at - (curves.running[0]?.at ?? at);
  const span = Math.min(HISTORY, Math.max(LEAST, age));
  const top = curve(byId(`${name}-chart`), curves[name], span);
  if (name !== "tokens") return;
  put("tokens-top", amount(top));
  put("since", span < HISTORY ? `${Math.round(span)} s ago` : "2 minutes ago");
}

/** What a counter gained over the last few readings; undefined before there are two. */
function grown(name) {
  const now = readings.at(-1).counters[name];
  const before = readings.at(-1 - SMOOTH)?.counters[name] ?? readings[0].counters[name];
  if (readings.length < 2 || now === undefined || before === undefined) return undefined;
  return Math.max(0, now - before);
}

/** The same a second. */
function rate(name) {
  const gain = grown(name);
  const before = readings.at(-1 - SMOOTH) ?? readings[0];
  return gain === undefined ? undefined : gain / (readings.at(-1).at - before.at);
}
