// The sweeps of a run: their tables, held-out losses by step, and losses against swept values.
import { LineChart, prepared, ticks } from "./chart.js";
import { css, fieldName, isDark, make, number, shownValue } from "./format.js";
import { hideTip, showTip } from "./tip.js";

// Configurations that a table shows, the best first.
const MOST_ROWS = 200;
// Values whose largest is so many times the smallest have a logarithmic axis, as in sweep.png.
const WIDE = 8;
const VIRIDIS = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];

export class Sweeps {
  // onOpen: opens a task.
  constructor(element, { onOpen }) {
    Object.assign(this, { element, onOpen, views: new Map() });
  }

  show(state) {
    for (const [name, sweep] of Object.entries(state.sweeps)) {
      if (!this.views.has(name)) this.views.set(name, new SweepView(this.element, name, this.onOpen));
      this.views.get(name).show(sweep, state);
    }
    for (const [name, view] of this.views) {
      if (name in state.sweeps) continue;
      view.section.remove();
      this.views.delete(name);
    }
  }
}

// The configurations, the best first: by the best_metric of the task, or by training loss if no
// held-out data are measured. Those that failed or have no such number come last.
export function ranked(sweep, tasks) {
  const rows = tasks.filter((row) => row.name in sweep.values);
  const held = rows.some((row) => row.held_out !== null);
  const score = (row) => (held ? row.final_value ?? row.value : row.nan ? null : row.loss);
  const sign = held && rows[0]?.higher ? -1 : 1;
  const key = (row) => [row.state === "failed" ? 1 : 0, score(row) === null ? 1 : 0, sign * (score(row) ?? 0)];
  rows.sort((a, b) => key(a).reduce((order, value, i) => order || value - key(b)[i], 0));
  const metric = held ? rows[0].metric : "loss";
  return rows.map((row) => ({ row, score: score(row), values: sweep.values[row.name], result: resultOf(row), held, metric }));
}

function resultOf(row) {
  const rung = /^at rung (\d+) /.exec(row.reason ?? "");
  return rung ? `rung ${rung[1]}` : row.state === "succeeded" ? "trained" : row.state;
}

// Steps at which configurations are compared.
export function rungs(sweep, steps) {
  const found = [];
  for (let step = sweep.first_rung ?? Infinity; step < steps; step *= sweep.factor) found.push(step);
  return found;
}

class SweepView {
  constructor(parent, name, onOpen) {
    this.onOpen = onOpen;
    this.unit = make("span", { className: "unit" });
    this.chart = make("div", { className: "chart" });
    this.plots = make("div", { className: "plots" });
    this.table = make("table", {});
    this.note = make("p", { className: "note foot" });
    const scroll = make("div", { className: "scroll sweep", tabIndex: 0 }, this.table);
    scroll.setAttribute("role", "group");
    scroll.setAttribute("aria-label", `Configurations of ${name}`);
    this.section = make("section", { className: "panel" }, make("div", { className: "head" }, make("h2", {}, `Sweep ${name} `, this.unit)), scroll, this.chart, this.plots, this.note);
    parent.append(this.section);
    this.losses = new LineChart(this.chart, { label: `Held-out losses of the sweep ${name} by step`, xName: "step" });
    this.scatters = new Map();
  }

  show(sweep, state) {
    const key = `${state.version} ${isDark()}`;
    if (key === this.key) return;
    this.key = key;
    const found = ranked(sweep, state.tasks);
    const steps = rungs(sweep, Math.max(0, ...found.map(({ row }) => row.steps ?? 0)));
    const paths = Object.keys(found[0]?.values ?? {});
    const names = new Map(paths.map((path) => [path, fieldName(path, paths)]));
    this.unit.textContent = `${found.length} configurations, the best first${steps.length ? `; compared at the steps ${steps.join(", ")}` : ""}`;
    this.drawTable(found, paths, names);
    const tints = found.map((_, i) => rankColour(i, found.length));
    const lines = found.slice(0, MOST_ROWS).map(({ row }, i) => {
      const points = state.held_out[row.name] ?? [];
      return { name: i ? row.name : "best", xs: points.map((point) => point[0]), ys: points.map((point) => point[1]), colour: tints[i], width: i ? 1.2 : 2.4, label: i ? false : undefined };
    });
    this.chart.hidden = !lines.some(({ xs }) => xs.length > 1);
    this.losses.show(lines.reverse(), { log: true, rules: steps });
    for (const path of paths) {
      if (!this.scatters.has(path)) {
        const scatter = new Scatter(this.onOpen);
        this.scatters.set(path, scatter);
        this.plots.append(scatter.element);
      }
      this.scatters.get(path).show(found.map((own, i) => ({ ...own, value: own.values[path], tint: tints[i] })), path);
    }
    const metric = found[0]?.metric ?? "loss";
    const loss = metric !== "loss" ? metric : found[0]?.held ? "held-out loss" : "last training loss";
    this.note.textContent = `Above: held-out loss by step${steps.length ? ", dashed: rungs" : ""}. Below: ${loss} against each swept value. Bright: best, dark: worst. Circles: trained or training, triangles: stopped at a rung, squares: stopped early, crosses: failed.${found.length > MOST_ROWS ? ` The table shows the best ${MOST_ROWS}.` : ""}`;
  }

  drawTable(found, paths, names) {
    const metric = found[0]?.metric ?? "loss";
    const heads = ["", ...paths.map((path) => names.get(path)), "steps", "train", "held-out", ...(metric === "loss" ? [] : [metric]), "result"];
    const rows = found.slice(0, MOST_ROWS).map(({ row, values, result, score }, i) => {
      const open = make("button", { type: "button", className: "link", title: row.name }, String(i + 1));
      open.setAttribute("aria-label", `${i + 1}: open ${row.name}`);
      open.addEventListener("click", () => this.onOpen(row.name));
      const cells = [...paths.map((path) => shownValue(values[path])), row.steps ? `${row.step}/${row.steps}` : row.step, row.nan ? "nan" : number(row.loss), number(row.final ?? row.held_out), ...(metric === "loss" ? [] : [number(score)]), result];
      return make("tr", {}, make("td", {}, open), ...cells.map((text) => make("td", {}, String(text))));
    });
    this.table.replaceChildren(make("thead", {}, make("tr", {}, ...heads.map((text) => make("th", { scope: "col" }, text)))), make("tbody", {}, ...rows));
  }
}

// Bright for the best, dark for the worst; on a dark page the darkest part cannot be seen.
function rankColour(rank, count) {
  const [bright, darkest] = isDark() ? [1, 0.3] : [0.88, 0];
  const place = (bright + ((darkest - bright) * rank) / Math.max(1, count - 1)) * (VIRIDIS.length - 1);
  const low = Math.min(VIRIDIS.length - 2, Math.floor(place));
  return `rgb(${VIRIDIS[low].map((value, i) => Math.round(value + (VIRIDIS[low + 1][i] - value) * (place - low))).join(" ")})`;
}

// The loss of each configuration, or its best_metric, against the values of one swept field.
class Scatter {
  constructor(onOpen) {
    this.canvas = make("canvas");
    this.canvas.setAttribute("role", "img");
    this.title = make("h3");
    this.chart = make("div", { className: "chart" }, this.canvas);
    this.element = make("div", {}, this.title, this.chart);
    this.spots = [];
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", hideTip);
    this.canvas.addEventListener("click", (event) => {
      const spot = this.near(event);
      if (spot) onOpen(spot.row.name);
    });
    new ResizeObserver(() => this.draw()).observe(this.chart);
  }

  show(found, path) {
    this.metric = found[0]?.metric ?? "loss";
    this.found = found.filter(({ score }) => score !== null && (this.metric !== "loss" || score > 0));
    this.title.textContent = path;
    const best = this.found[0];
    const name = this.metric === "loss" ? "Loss" : this.metric;
    this.canvas.setAttribute("aria-label", `${name} against ${path}. ${best ? `Best: ${number(best.score)} at ${shownValue(best.value)}.` : "No losses yet."} The table has all values.`);
    this.draw();
  }

  // Where values are from 0 to 1, and the ticks.
  scale() {
    const values = this.found.map(({ value }) => value);
    const known = [...new Set(values.map(shownValue))];
    if (!values.every((value) => typeof value === "number") || known.length < 2) {
      const place = (value) => (known.indexOf(shownValue(value)) + 0.6) / (known.length + 0.2);
      return { place, marks: known.map((text) => [(known.indexOf(text) + 0.6) / (known.length + 0.2), text]) };
    }
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const bend = low > 0 && high >= WIDE * low ? Math.log : (value) => value;
    const place = (value) => 0.04 + (0.92 * (bend(value) - bend(low))) / (bend(high) - bend(low));
    const several = known.length <= 8 ? [...new Set(values)] : bend === Math.log ? [low, Math.sqrt(low * high), high] : ticks(low, high, 4);
    return { place, marks: several.map((value) => [place(value), shownValue(value)]) };
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.chart;
    if (!width || !this.found) return;
    const context = prepared(this.canvas, width, height);
    this.spots = [];
    context.fillStyle = css("--soft");
    context.textAlign = "center";
    if (!this.found.length) return context.fillText("no losses yet", width / 2, height / 2);
    const box = { left: 52, right: width - 8, top: 8, bottom: height - 22 };
    // Values of metrics other than the loss may be 0 or negative.
    const [bend, unbent] = this.metric === "loss" ? [Math.log, Math.exp] : [(score) => score, (score) => score];
    const bent = this.found.map(({ score }) => bend(score));
    let [low, high] = [Math.min(...bent), Math.max(...bent)];
    if (high - low < 1e-3) [low, high] = [low - 0.05, high + 0.05];
    const y = (score) => box.bottom - 6 - ((bend(score) - low) / (high - low)) * (box.bottom - box.top - 12);
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const share of [0, 1 / 3, 2 / 3, 1]) {
      const score = unbent(low + share * (high - low));
      context.strokeStyle = css("--rule");
      context.beginPath();
      context.moveTo(box.left, Math.round(y(score)) + 0.5);
      context.lineTo(box.right, Math.round(y(score)) + 0.5);
      context.stroke();
      context.fillText(number(score, 3), box.left - 7, y(score));
    }
    const { place, marks } = this.scale();
    const x = (share) => box.left + share * (box.right - box.left);
    context.textBaseline = "top";
    context.textAlign = "center";
    let free = 0;
    for (const [share, text] of marks.sort((a, b) => a[0] - b[0])) {
      const room = marks.length > 1 ? (box.right - box.left) / marks.length : box.right - box.left;
      const shown = fitted(context, text, Math.max(room - 6, 28));
      const half = context.measureText(shown).width / 2;
      const at = Math.min(Math.max(x(share), half), width - half);
      if (at - half < free) continue;
      context.fillText(shown, at, box.bottom + 6);
      free = at + half + 6;
    }
    for (const own of [...this.found].reverse()) {
      const spot = { ...own, x: x(place(own.value)), y: y(own.score) };
      this.spots.push(spot);
      marker(context, spot);
    }
  }

  near({ offsetX, offsetY }) {
    const distance = (spot) => Math.hypot(spot.x - offsetX, spot.y - offsetY);
    const found = this.spots.reduce((best, spot) => (!best || distance(spot) <= distance(best) ? spot : best), null);
    return found && distance(found) < 14 ? found : null;
  }

  point(event) {
    const spot = this.near(event);
    this.canvas.style.cursor = spot ? "pointer" : "";
    if (!spot) return hideTip();
    showTip(event.clientX, event.clientY, `${spot.row.name} · ${spot.result}`, [[this.metric, number(spot.score)], ...Object.entries(spot.values).map(([path, value]) => [path, shownValue(value)])]);
  }
}

// A text that is as wide as there is room: values often differ at their ends.
function fitted(context, text, room) {
  let shown = text;
  for (let length = text.length - 1; length > 2 && context.measureText(shown).width > room; length--) shown = `${text.slice(0, Math.floor(length / 3))}…${text.slice(-Math.ceil((2 * length) / 3) + 1)}`;
  return shown;
}

function marker(context, { x, y, result, tint }) {
  context.fillStyle = context.strokeStyle = tint;
  context.beginPath();
  if (result.startsWith("rung")) {
    context.moveTo(x - 4.5, y - 3.5);
    context.lineTo(x + 4.5, y - 3.5);
    context.lineTo(x, y + 4.5);
    context.fill();
  } else if (result === "failed") {
    context.lineWidth = 2;
    for (const way of [1, -1]) {
      context.moveTo(x - 4, y - 4 * way);
      context.lineTo(x + 4, y + 4 * way);
    }
    context.stroke();
  } else if (result === "stopped early") context.fillRect(x - 4, y - 4, 8, 8);
  else {
    context.arc(x, y, 4, 0, 7);
    context.fill();
  }
}
