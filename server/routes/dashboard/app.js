// What the page does: theme, readiness, the model's name; the numbers and the playground.

import { play } from "./playground.js";
import { byId } from "./show.js";
import { watch } from "./watch.js";

const READY_MS = 3000;
const THEME = "srm-theme";

/** What every request carries. The key is nowhere but in its field. */
function headers() {
  const key = byId("key").value.trim();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").setAttribute("aria-pressed", theme === "dark");
}

function startTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const preferred = () => (system.matches ? "dark" : "light");
  setTheme(localStorage.getItem(THEME) ?? preferred());
  system.addEventListener("change", () => setTheme(localStorage.getItem(THEME) ?? preferred()));
  byId("theme").addEventListener("click", () => {
    const chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    localStorage.setItem(THEME, chosen);
    setTheme(chosen);
  });
}

function setState(state, text) {
  byId("state").dataset.state = state;
  if (byId("state-text").textContent !== text) byId("state-text").textContent = text;
}

async function askReady() {
  try {
    const reply = await fetch(new URL("ready", document.baseURI), { headers: headers(), cache: "no-store" });
    const said = await reply.json();
    const isPart = said.engines?.some((state) => state !== "ready");
    if (isPart) setState("part", `Ready: ${said.summary}`);
    else if (reply.ok) setState("ready", "Ready");
    else setState("bad", said.error?.message ?? `Not ready: ${reply.status}`);
  } catch {
    setState("bad", "Not reachable");
  }
}

/** Until the server says it once: it may want a key first. */
async function askName() {
  if (byId("model").dataset.known) return;
  try {
    const reply = await fetch(new URL("v1/models", document.baseURI), { headers: headers() });
    if (!reply.ok) return;
    const name = (await reply.json()).data[0].id;
    byId("model").textContent = name;
    byId("model").dataset.known = "yes";
    byId("form").dispatchEvent(new Event("input")); // requests name the model
    document.title = `${name} – SRM server`;
  } catch {
    return; // asked again with the next question for readiness, which says what is wrong
  }
}

async function keepAsking() {
  for (;;) {
    if (!document.hidden) await Promise.all([askReady(), askName()]);
    await new Promise((resolve) => setTimeout(resolve, READY_MS));
  }
}

startTheme();
play(headers);
keepAsking();
watch(headers);
