// Prometheus' text format, as far as this server writes it, and what can be read out of it.

const LINE = /^([^\s{]+)(?:\{(.*)\})? (\S+)/;
const LABEL = /([^=,]+)="((?:[^"\\]|\\.)*)"/g;

/** Text to a map from sample name to [{labels, value}]. */
export function parse(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    const found = line.startsWith("#") ? null : LINE.exec(line);
    if (!found) continue;
    const [, name, inside, value] = found;
    const labels = {};
    for (const [, label, content] of (inside ?? "").matchAll(LABEL)) labels[label] = content;
    if (!samples.has(name)) samples.set(name, []);
    samples.get(name).push({ labels, value: value === "+Inf" ? Infinity : Number(value) });
  }
  return samples;
}

/** The sum of a name's samples, of those that pass; undefined if no process has any. */
export function total(samples, name, passes = () => true) {
  return samples.get(name)?.filter(({ labels }) => passes(labels))
    .reduce((sum, { value }) => sum + value, 0);
}

/** A histogram's buckets as [{bound, count}], counts cumulative. */
export function buckets(samples, name) {
  return (samples.get(`${name}_bucket`) ?? [])
    .map(({ labels, value }) => ({ bound: labels.le === "+Inf" ? Infinity : Number(labels.le), count: value }))
    .sort((one, other) => one.bound - other.bound);
}

/** What was observed between two readings; all of it if the earlier one had none. */
export function since(later, earlier) {
  const before = new Map(earlier.map(({ bound, count }) => [bound, count]));
  const grown = later.map(({ bound, count }) => ({ bound, count: count - (before.get(bound) ?? 0) }));
  return grown.some(({ count }) => count < 0) ? later : grown;
}

/** How many observations there are. */
export const size = (histogram) => histogram.at(-1)?.count ?? 0;

/** The value that a share q of observations does not exceed, as far as buckets tell. */
export function quantile(histogram, q) {
  const rank = q * size(histogram);
  if (!rank) return undefined;
  const place = histogram.findIndex(({ count }) => count >= rank);
  const { bound, count } = histogram[place];
  const low = place ? histogram[place - 1] : { bound: 0, count: 0 };
  if (bound === Infinity) return low.bound;
  return low.bound + (bound - low.bound) * (rank - low.count) / (count - low.count);
}
