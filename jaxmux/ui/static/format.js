// Numbers, times and colours as the page shows them.

const LIGHT = ["#0f6fb5", "#d1570a", "#0b8f6c", "#b04a8b", "#b98400", "#3f9fd6", "#6a51a3", "#77772f"];
const DARK = ["#5aa9e6", "#f08a4b", "#3fc79a", "#e08fc0", "#f0b93a", "#9ad6f7", "#ab95e0", "#c2c27a"];
const dark = matchMedia("(prefers-color-scheme: dark)");

// Colours that people with colour blindness can tell apart, after Okabe and Ito.
export const MOST_COLOURS = LIGHT.length;
export const colour = (index) => (dark.matches ? DARK : LIGHT)[index % MOST_COLOURS];
// Tasks whose places among all tasks have the same colour differ by the dashes of their lines.
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];
export const dash = (place) => DASHES[Math.floor(place / MOST_COLOURS) % DASHES.length];
export const isDark = () => dark.matches;
export const onThemeChange = (call) => dark.addEventListener("change", call);
export const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function number(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return trimmed(value / 1e9) + " G";
  if (size >= 1e6) return trimmed(value / 1e6) + " M";
  if (size >= 1e4) return trimmed(value / 1e3) + " k";
  if (size > 0 && size < 1e-3) return value.toExponential(1).replace(".0e", "e").replace("e-", "e−");
  if (Number.isInteger(value)) return String(value);
  if (size >= 1000) return count(value);
  return value.toPrecision(digits - (size < 0.01 ? 1 : 0)).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
}
const trimmed = (value) => String(Number(value.toPrecision(3)));

// A swept value as tables show it; of data the file, and of an adapter or the like its fields.
export function shownValue(value) {
  if (typeof value === "number") return String(Number(value.toPrecision(6)));
  if (Array.isArray(value)) return value.map(shownValue).join(", ");
  if (value === null || typeof value !== "object") return String(value);
  if (value.path) return String(value.path).split("/").at(-1);
  return Object.values(value).filter((own) => own !== null && typeof own !== "object").map(shownValue).join(", ");
}

// The last part of a path, or as many parts as tell it from the others.
export function fieldName(path, paths) {
  const end = path.split(".").at(-1);
  return paths.filter((own) => own.split(".").at(-1) === end).length > 1 ? path : end;
}

// By name of a task that is a configuration of a sweep, its swept values in words.
export function configurations(sweeps) {
  const several = Object.keys(sweeps).length > 1;
  const found = new Map();
  for (const [sweep, { values }] of Object.entries(sweeps)) {
    for (const [name, own] of Object.entries(values)) {
      const paths = Object.keys(own);
      const text = paths.map((path) => `${fieldName(path, paths)} ${shownValue(own[path])}`).join(", ");
      found.set(name, several ? `${sweep}: ${text}` : text);
    }
  }
  return found;
}

// By name of a task, a label of at most so many characters, and different ones for different
// names. Configurations of a sweep are told by the values that differ; other names are cut in their
// middles, or, if that makes them equal, where they are equal.
export function labelsOf(names, sweeps, longest) {
  const labels = new Map(names.map((name) => [name, name]));
  const several = Object.keys(sweeps).length > 1;
  for (const [sweep, { values }] of Object.entries(sweeps)) {
    const paths = Object.keys(Object.values(values)[0] ?? {});
    const all = Object.values(values);
    const told = paths.filter((path) => new Set(all.map((own) => shownValue(own[path]))).size > 1);
    const shown = (own, formats) => told.map((path) => formats.get(path)(own[path])).join(", ");
    const whole = new Map(told.map((path) => [path, shownValue]));
    const short = new Map(told.map((path) => [path, shortValue(all.map((own) => own[path]))]));
    const formats = all.every((own) => shown(own, whole).length <= longest) ? whole : short;
    for (const [name, own] of Object.entries(values)) {
      const text = shown(own, formats);
      if (labels.has(name) && text) labels.set(name, several ? `${sweep}: ${text}` : text);
    }
  }
  const texts = distinct([...labels.values()], longest);
  return new Map([...labels.keys()].map((name, i) => [name, texts[i]]));
}

// How values of one field are shown in little room: numbers in their shortest form, and of texts the
// first letters that tell them apart.
function shortValue(values) {
  const texts = [...new Set(values.map(shownValue))];
  const longest = Math.max(...texts.map((text) => text.length));
  let length = 3;
  while (length < longest && new Set(texts.map((text) => text.slice(0, length))).size < texts.length) length++;
  return (value) => {
    const text = shownValue(value);
    if (typeof value === "number") return [text, Number(text).toExponential().replace("e+", "e")].sort((a, b) => a.length - b.length)[0];
    return text.length > length + 1 ? `${text.slice(0, length)}…` : text;
  };
}

function distinct(texts, longest) {
  const cut = texts.map((text) => cutMiddle(text, longest));
  // From rough to fine: without the words that all have, then without what those that are still
  // equal have in common.
  const words = texts.map((text) => new Set(text.split(/[-_., ]+/)));
  const common = new Set([...(words[0] ?? [])].filter((word) => words.every((own) => own.has(word))));
  const told = (text) => text.replace(/[^-_., ]+/g, (word) => (common.has(word) ? "…" : word)).replace(/([-_., ]*…[-_., ]*)+/g, "…");
  if (new Set(cut).size < new Set(texts).size) texts.forEach((text, i) => (cut[i] = cutMiddle(told(text), longest)));
  for (const group of Map.groupBy(texts.keys(), (i) => cut[i]).values()) {
    if (group.length < 2) continue;
    const [first, ...others] = group.map((i) => texts[i]);
    const shared = (at) => others.every((text) => at(text) !== undefined && at(text) === at(first));
    let [begin, end] = [0, 0];
    while (shared((text) => text[begin])) begin++;
    const shortest = Math.min(...group.map((i) => texts[i].length));
    while (begin + end < shortest && shared((text) => text.at(-1 - end))) end++;
    for (const i of group) cut[i] = cutMiddle(`…${texts[i].slice(Math.max(0, begin - 2), texts[i].length - end)}${end ? "…" : ""}`, longest);
  }
  // Names whose differences are too many for their labels get numbers.
  const seen = new Set();
  return cut.map((text, i) => {
    const label = seen.has(text) ? `${text.slice(0, longest - 1 - String(i + 1).length)}#${i + 1}` : text;
    seen.add(label);
    return label;
  });
}

function cutMiddle(text, longest) {
  if (text.length <= longest) return text;
  const begin = Math.floor((longest - 1) / 3);
  return `${text.slice(0, begin)}…${text.slice(begin + 1 - longest)}`;
}

// A count with all of its digits.
export const count = (value) => Math.round(value).toLocaleString("en");

export function duration(seconds) {
  if (!Number.isFinite(seconds) || seconds < 0) return "–";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${(seconds / 86400).toFixed(1)} d`;
}

export function clock(seconds) {
  const time = new Date(seconds * 1000);
  const today = new Date().toDateString() === time.toDateString();
  const text = time.toLocaleTimeString([], { hour12: false });
  return today ? text : `${time.toLocaleDateString([], { month: "short", day: "numeric" })} ${text}`;
}

export function make(tag, fields = {}, ...children) {
  const { className, ...others } = fields;
  const made = Object.assign(document.createElement(tag), others);
  if (className) made.className = className;
  made.append(...children.filter((child) => child !== null));
  return made;
}
