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
