// A chart of lines on a canvas, with a crosshair for mouse and keyboard.
import { css, make, number } from "./format.js";
import { hideTip, showTip } from "./tip.js";

const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif';

// A canvas in an element, as sharp as the screen; returns its context, in CSS pixels.
export function prepared(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = FONT;
  return context;
}

// Round values that divide an interval into about `count` parts.
export function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

function logTicks(low, high) {
  const decades = high - low;
  const factors = decades > 3 ? [1] : decades > 1.2 ? [1, 3] : [1, 2, 3, 5, 7];
  const found = [];
  for (let power = Math.floor(low); power <= Math.ceil(high); power++) {
    for (const factor of factors) {
      const value = factor * 10 ** power;
      if (Math.log10(value) >= low - 1e-9 && Math.log10(value) <= high + 1e-9) found.push(value);
    }
  }
  return found;
}

export class LineChart {
  // series: [{name, shown (its name in labels, if it is another), xs, ys, colour, faint, width, marks, label}]; faint ones are drawn first, have
  // no label and are found by the pointer only if nothing else is shown.
  // bare: whether no names stand beside the lines.
  constructor(element, { label, format = number, xName, onHover = () => {}, zero = false, legendless = false, bare = false }) {
    this.element = element;
    this.canvas = make("canvas", { tabIndex: 0 });
    this.canvas.setAttribute("role", "img");
    element.replaceChildren(this.canvas);
    Object.assign(this, { label, format, xName, onHover, zero, legendless, bare });
    this.series = [];
    this.log = false;
    this.at = null;
    this.hot = null;
    this.canvas.addEventListener("pointermove", (event) => this.point(event.offsetX, event.offsetY));
    this.canvas.addEventListener("pointerleave", () => this.leave());
    this.canvas.addEventListener("blur", () => this.leave());
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(element);
  }

  // rules: where dashed vertical lines are.
  show(series, { log = false, hot = null, rules = [] } = {}) {
    this.rules = rules;
    this.series = series.filter((own) => own.xs.length);
    this.log = log;
    this.hot = hot;
    const shown = this.series.filter((own) => !own.faint && own.label !== false);
    const last = shown.slice(0, 8).map((own) => `${own.name} ${this.format(own.ys.at(-1))}`);
    this.canvas.setAttribute("aria-label", `${this.label}. ${last.length ? `Latest: ${last.join(", ")}. Left and right arrows move.` : "No values yet."}`);
    this.draw();
  }

  scales(width, height) {
    let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const own of this.series) {
      x0 = Math.min(x0, own.xs[0]);
      x1 = Math.max(x1, own.xs.at(-1));
      for (const y of own.ys) {
        if (y === null || (this.log && y <= 0)) continue;
        if (y < y0) y0 = y;
        if (y > y1) y1 = y;
      }
    }
    if (!(y0 <= y1)) [y0, y1] = this.log ? [0.1, 1] : [0, 1];
    if (!(x0 < x1)) [x0, x1] = [x0 - 0.5, x0 + 0.5];
    let scale = (y) => y;
    if (this.log) {
      scale = (y) => Math.log10(Math.max(y, 1e-12));
      [y0, y1] = [scale(y0), scale(y1)];
    } else if (this.zero) y0 = Math.min(0, y0);
    if (y1 - y0 < 1e-12) [y0, y1] = [y0 - (Math.abs(y0) * 0.1 || 0.5), y1 + (Math.abs(y1) * 0.1 || 0.5)];
    const slack = (y1 - y0) * 0.04;
    y1 += slack;
    if (!this.zero || this.log) y0 -= slack;
    const labelled = this.labelled();
    const right = width > 420 && labelled.length ? 124 : 10;
    const box = { left: 52, top: right < 20 ? 18 : 8, right: width - right, bottom: height - 22 };
    const x = (value) => box.left + ((value - x0) / (x1 - x0)) * (box.right - box.left);
    const y = (value) => box.bottom - ((scale(value) - y0) / (y1 - y0)) * (box.bottom - box.top);
    return { x, y, box, range: [x0, x1, y0, y1], right };
  }

  labelled() {
    const shown = this.series.filter((own) => !own.faint && own.label !== false);
    return shown.length <= 10 && !this.bare ? shown : [];
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.element;
    if (!width || !height) return;
    const context = prepared(this.canvas, width, height);
    if (!this.series.length) {
      context.fillStyle = css("--soft");
      context.textAlign = "center";
      context.fillText("no values yet", width / 2, height / 2);
      return;
    }
    const found = (this.found = this.scales(width, height));
    this.axes(context, found);
    context.save();
    context.beginPath();
    context.rect(found.box.left - 4, 0, found.box.right - found.box.left + 8, found.box.bottom + 4);
    context.clip();
    const order = [...this.series].sort((a, b) => Number(a.name === this.hot) - Number(b.name === this.hot) || Number(!!b.faint) - Number(!!a.faint));
    for (const value of this.rules) this.rule(context, found, value);
    for (const own of order) this.line(context, own, found);
    context.restore();
    this.labels(context, found);
    this.cross(context, found);
  }

  axes(context, { x, y, box, range }) {
    const [x0, x1, y0, y1] = range;
    const ys = this.log ? logTicks(y0, y1) : ticks(y0, y1, (box.bottom - box.top) / 48);
    context.lineWidth = 1;
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const value of ys) {
      const at = Math.round(y(value)) + 0.5;
      context.strokeStyle = css("--rule");
      context.beginPath();
      context.moveTo(box.left, at);
      context.lineTo(box.right, at);
      context.stroke();
      context.fillStyle = css("--soft");
      context.fillText(this.format(value), box.left - 7, at);
    }
    context.strokeStyle = css("--line");
    context.beginPath();
    context.moveTo(box.left, box.bottom + 0.5);
    context.lineTo(box.right, box.bottom + 0.5);
    context.stroke();
    context.textBaseline = "top";
    context.textAlign = "center";
    const xs = ticks(x0, x1, (box.right - box.left) / 90).filter(Number.isInteger);
    const name = this.xName;
    const reserved = box.right - context.measureText(name).width - 14;
    for (const value of xs) {
      const text = number(value);
      if (x(value) + context.measureText(text).width / 2 > reserved) continue;
      context.fillText(text, x(value), box.bottom + 6);
    }
    context.textAlign = "right";
    context.fillText(name, box.right, box.bottom + 6);
  }

  rule(context, { x, box }, value) {
    context.strokeStyle = css("--idle");
    context.setLineDash([4, 4]);
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(x(value), box.top);
    context.lineTo(x(value), box.bottom);
    context.stroke();
    context.setLineDash([]);
  }

  line(context, own, { x, y }) {
    const hot = this.hot !== null && own.name === this.hot;
    const dimmed = this.hot !== null && !hot;
    context.strokeStyle = context.fillStyle = hot && own.faint ? css("--ink") : own.colour;
    context.globalAlpha = (dimmed ? 0.25 : 1) * (hot ? 1 : own.alpha ?? 1);
    if (own.marks) {
      own.xs.forEach((value, i) => {
        if (this.log && own.ys[i] <= 0) return;
        context.beginPath();
        context.arc(x(value), y(own.ys[i]), 4, 0, 7);
        context.fillStyle = css("--panel");
        context.fill();
        context.lineWidth = 1.8;
        context.stroke();
      });
    } else {
      context.lineWidth = hot ? 2.2 : own.width ?? 1.6;
      context.lineJoin = "round";
      context.setLineDash(own.dash ?? []);
      context.beginPath();
      let pen = false;
      own.xs.forEach((value, i) => {
        if (own.ys[i] === null || (this.log && own.ys[i] <= 0)) return (pen = false);
        context[pen ? "lineTo" : "moveTo"](x(value), y(own.ys[i]));
        pen = true;
      });
      if (own.xs.length === 1) context.arc(x(own.xs[0]), y(own.ys[0]), 1.5, 0, 7);
      context.stroke();
      context.setLineDash([]);
    }
    context.globalAlpha = 1;
  }

  labels(context, { y, box, right }) {
    if (right < 20) return this.legend(context, box);
    const own = this.labelled().map((each) => ({ each, at: y(each.ys.at(-1)) })).sort((a, b) => a.at - b.at);
    own.forEach((label, i) => (label.at = Math.max(label.at, i ? own[i - 1].at + 15 : box.top + 4)));
    for (let i = own.length - 1, most = box.bottom - 4; i >= 0; i--, most -= 15) own[i].at = Math.min(own[i].at, most);
    context.textAlign = "left";
    context.textBaseline = "middle";
    for (const { each, at } of own) {
      context.globalAlpha = this.hot !== null && each.name !== this.hot ? 0.4 : 1;
      context.fillStyle = each.colour;
      let text = each.shown ?? each.name;
      while (text.length > 3 && context.measureText(text).width > right - 14) text = text.slice(0, -2) + "…";
      context.fillText(text, box.right + 8, at);
    }
    context.globalAlpha = 1;
  }

  // On narrow screens, the names of a few lines stand above them.
  legend(context, box) {
    const own = this.labelled();
    if (own.length < 1 || own.length > 3 || this.legendless) return;
    context.textAlign = "right";
    context.textBaseline = "top";
    let at = box.right;
    for (const each of [...own].reverse()) {
      context.fillStyle = each.colour;
      context.fillText(each.shown ?? each.name, at, 0);
      at -= context.measureText(each.shown ?? each.name).width + 14;
    }
  }

  cross(context, { x, y, box }) {
    if (this.at === null) return;
    const at = Math.round(x(this.at)) + 0.5;
    context.strokeStyle = css("--idle");
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(at, box.top);
    context.lineTo(at, box.bottom);
    context.stroke();
    for (const { own, i } of this.values(this.at)) {
      if (own.ys[i] === null || (this.log && own.ys[i] <= 0)) continue;
      context.fillStyle = own.colour;
      context.beginPath();
      context.arc(x(own.xs[i]), y(own.ys[i]), 3, 0, 7);
      context.fill();
    }
  }

  // The values of the labelled series at a place; of those without a value there, the nearest.
  values(at) {
    const shown = this.series.filter((own) => !own.marks && own.label !== false && (!own.faint || own.name === this.hot));
    return shown.map((own) => ({ own, i: nearest(own.xs, at) })).filter(({ own, i }) => Math.abs(own.xs[i] - at) <= (this.found.range[1] - this.found.range[0]) / 20 + 1);
  }

  point(left, top) {
    if (!this.series.length || !this.found) return;
    const { x, y, box, range } = this.found;
    const at = range[0] + ((left - box.left) / (box.right - box.left)) * (range[1] - range[0]);
    let best = { distance: 26 };
    for (const own of this.series) {
      if (own.marks) continue;
      const i = nearest(own.xs, at);
      if (own.ys[i] === null) continue;
      const distance = Math.hypot((x(own.xs[i]) - left) / 3, y(own.ys[i]) - top);
      if (distance < best.distance) best = { distance, own };
    }
    this.onHover(best.own?.name ?? null);
    this.moveTo(Math.min(range[1], Math.max(range[0], at)), top);
  }

  moveTo(at, top = this.found.box.top + 8) {
    const steps = this.series.find((own) => !own.faint && !own.marks) ?? this.series[0];
    this.at = steps.xs[nearest(steps.xs, at)];
    this.draw();
    const lines = this.values(this.at).map(({ own, i }) => [own.name, this.format(own.ys[i]), own.colour, own.ys[i]]);
    lines.sort((a, b) => b[3] - a[3]);
    const hot = lines.findIndex(([name]) => name === this.hot);
    if (hot > 0) lines.unshift(...lines.splice(hot, 1));
    const box = this.canvas.getBoundingClientRect();
    showTip(box.left + this.found.x(this.at), box.top + top, `${this.xName} ${number(this.at)}`, lines.slice(0, 12));
  }

  leave() {
    this.at = null;
    hideTip();
    this.onHover(null);
    this.draw();
  }

  key(event) {
    if (!this.series.length) return;
    const steps = (this.series.find((own) => !own.faint && !own.marks) ?? this.series[0]).xs;
    const now = this.at === null ? steps.length - 1 : nearest(steps, this.at);
    const by = event.shiftKey ? 10 : 1;
    const moves = { ArrowLeft: now - by, ArrowRight: now + by, Home: 0, End: steps.length - 1 };
    if (event.key === "Escape") return this.leave();
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.moveTo(steps[Math.min(steps.length - 1, Math.max(0, moves[event.key]))]);
  }
}

// A moving mean of the neighbours on both sides, so that it does not lag where values fall. The
// weights fall off by e with each fiftieth of the steps and are divided by their sum, so the first
// values are not drawn to zero, and a constant stays as it is.
export function smoothed(xs, ys) {
  const span = Math.max(1, (xs.at(-1) - xs[0]) / 50);
  const sums = ys.map(() => 0);
  const weights = ys.map(() => 0);
  // From the left up to each value, then from the right up to the one beside it.
  for (const [from, to, by, own] of [[0, ys.length, 1, true], [ys.length - 1, -1, -1, false]]) {
    let [sum, weight, before] = [0, 0, xs[from]];
    for (let i = from; i !== to; i += by) {
      const keep = Math.exp(-Math.abs(xs[i] - before) / span);
      before = xs[i];
      [sum, weight] = [sum * keep, weight * keep];
      sums[i] += own ? sum + ys[i] : sum;
      weights[i] += own ? weight + 1 : weight;
      [sum, weight] = [sum + ys[i], weight + 1];
    }
  }
  return sums.map((sum, i) => sum / weights[i]);
}

export function nearest(xs, at) {
  let [low, high] = [0, xs.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < at) low = middle + 1;
    else high = middle;
  }
  return low > 0 && at - xs[low - 1] < xs[low] - at ? low - 1 : low;
}
