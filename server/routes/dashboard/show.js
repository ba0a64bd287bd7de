// Numbers as text and as curves.

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const tenths = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const GAP = 5; // seconds without a reading, of which a curve shows nothing
const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** 0, 0.3, 4.2, 38, 45,678, 912K; a dash for what is not known. */
export function amount(value) {
  if (value === undefined) return "–";
  if (value >= 1e5) return compact.format(value);
  return (value < 9.95 ? tenths : whole).format(value);
}

/** All digits. */
export const count = (value) => (value === undefined ? "–" : whole.format(value));

/** Seconds as the unit that fits. */
export function duration(seconds) {
  if (seconds === undefined) return "–";
  if (seconds >= 100) return `${whole.format(seconds)} s`;
  if (seconds >= 1) return `${seconds.toPrecision(3)} s`;
  return `${Number((1000 * seconds).toPrecision(2))} ms`;
}

/** Change text only if it differs, so that a selection survives. */
export function put(id, text) {
  const element = byId(id);
  if (element.textContent !== text) element.textContent = text;
}

/** The least round number that is not below. */
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value);
}

/** Draw [{at, value}] of the last `span` seconds into an SVG, now at the right; returns the top. */
export function curve(svg, readings, span) {
  const { width, height } = svg.viewBox.baseVal;
  const now = readings.at(-1)?.at;
  const top = nice(Math.max(...readings.map(({ value }) => value), 1e-9));
  const x = (at) => (width * (1 - (now - at) / span)).toFixed(1);
  const y = (value) => (height - 1 - (value / top) * (height - 4)).toFixed(1);
  const drawn = (piece) => `M${piece.map(({ at, value }) => `${x(at)},${y(value)}`).join("L")}`;
  const isBroken = ({ at }, place) => at - readings[place - 1]?.at > GAP;
  const starts = [0, ...readings.keys()].filter((place, nth) => !nth || isBroken(readings[place], place));
  const pieces = readings.length ? starts.map((start, nth) => readings.slice(start, starts[nth + 1])) : [];
  const line = pieces.map(drawn).join("");
  const area = pieces.map((one) => `${drawn(one)}L${x(one.at(-1).at)},${height}L${x(one[0].at)},${height}Z`).join("");
  const shapes = [["area", area], ["line", line]];
  if (svg.classList.contains("chart")) {
    const lines = [0, 0.5, 1].map((share) => `M0,${y(top * share)}H${width}`);
    shapes.unshift(["grid", lines.join("")]);
  }
  svg.replaceChildren(...shapes.map(([kind, d]) => {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", kind);
    path.setAttribute("d", d);
    return path;
  }));
  return top;
}
