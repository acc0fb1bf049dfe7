// What the microbatches of a round held, and the passes of a pipeline.
import { prepared } from "./chart.js";
import { colour, count, css, make, number } from "./format.js";
import { hideTip, showTip } from "./tip.js";

const BAR = 22;
const GAP = 4;
const LEFT = 48;

export class Microbatches {
  constructor(element, onHover) {
    this.element = element;
    this.canvas = make("canvas");
    this.canvas.setAttribute("role", "img");
    this.onHover = onHover;
    this.boxes = [];
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => {
      hideTip();
      this.onHover(null);
    });
    new ResizeObserver(() => this.draw()).observe(element);
  }

  // held: [[replica, capacity, {task: [tokens of chunks, tokens read]}]] of a round, or null.
  // colours: by task, the place that gives its colour; order: the names of all tasks.
  // labels: by task, its short name.
  // trained: whether rounds are known.
  show(held, { colours, order, labels, hot, trained }) {
    Object.assign(this, { held, colours, labels, hot });
    this.order = new Map(order.map((name, i) => [name, i]));
    if (!held?.length) {
      this.element.replaceChildren(make("p", { className: "empty" }, held ? "This round trained no microbatch in this process." : trained ? "An earlier version has trained these rounds without recording what they held." : "No round has been trained yet."));
      return;
    }
    if (this.canvas.parentNode !== this.element) this.element.replaceChildren(this.canvas);
    this.canvas.setAttribute("aria-label", `${held.length} microbatches: ${held.slice(0, 6).map(([, , tasks], i) => `${i + 1} holds ${Object.keys(tasks).slice(0, 8).join(", ")}`).join("; ")}`);
    this.draw();
  }

  draw() {
    if (!this.held?.length) return;
    const width = this.element.clientWidth;
    if (!width) return;
    const shown = this.held.slice(0, 64);
    const height = shown.length * (BAR + GAP) + 2;
    this.canvas.style.height = `${height}px`;
    const context = prepared(this.canvas, width, height);
    const most = Math.max(...shown.map(([, capacity]) => capacity));
    const replicas = new Set(shown.map(([replica]) => replica)).size > 1;
    this.boxes = [];
    context.textBaseline = "middle";
    shown.forEach(([replica, capacity, tasks], i) => {
      const top = i * (BAR + GAP);
      const scale = (width - LEFT - 2) / most;
      context.textAlign = "right";
      context.fillStyle = css("--soft");
      context.fillText(replicas ? `${replica}:${i + 1}` : String(i + 1), LEFT - 8, top + BAR / 2);
      context.fillStyle = css("--rule");
      context.fillRect(LEFT, top, capacity * scale, BAR);
      let at = LEFT;
      const own = Object.entries(tasks).sort(([a], [b]) => (this.order.get(a) ?? 1e9) - (this.order.get(b) ?? 1e9));
      for (const [name, [chunks, read]] of own) {
        const size = chunks * scale;
        this.segment(context, { name, chunks, read, at, top, size, number: i + 1, capacity });
        at += size;
      }
      const used = own.reduce((sum, [, [chunks]]) => sum + chunks, 0);
      if (capacity > used) this.boxes.push({ at, top, size: (capacity - used) * scale, unused: capacity - used, number: i + 1, capacity });
    });
  }

  segment(context, box) {
    const { name, chunks, read, at, top, size } = box;
    const place = this.colours.get(name);
    context.globalAlpha = this.hot && this.hot !== name ? 0.3 : 1;
    context.fillStyle = place === undefined ? (this.hot === name ? css("--ink") : css("--idle")) : colour(place);
    const solid = (size - 1) * Math.min(1, read / chunks);
    context.fillRect(at, top, solid, BAR);
    context.globalAlpha *= 0.35;
    context.fillRect(at + solid, top, Math.max(0, size - 1 - solid), BAR);
    context.globalAlpha = this.hot && this.hot !== name ? 0.5 : 1;
    const label = this.labels.get(name) ?? name;
    if (solid > context.measureText(label).width + 10) {
      context.fillStyle = css("--panel");
      context.textAlign = "left";
      context.fillText(label, at + 5, top + BAR / 2 + 0.5);
    }
    context.globalAlpha = 1;
    this.boxes.push(box);
  }

  point(event) {
    const { offsetX: left, offsetY: top } = event;
    const box = this.boxes.find((own) => left >= own.at && left < own.at + own.size && top >= own.top && top < own.top + BAR);
    this.onHover(box?.name ?? null);
    if (!box) return hideTip();
    const share = (tokens) => `${count(tokens)} (${Math.round((100 * tokens) / box.capacity)} %)`;
    const lines = box.unused ? [["unused", share(box.unused)]] : [["tokens read", share(box.read)], ["padding in its chunks", share(box.chunks - box.read)]];
    showTip(event.clientX, event.clientY, `${box.name ?? "no task"} · microbatch ${box.number}`, lines);
  }
}

// Ticks of passes: a pass begins when its stage is free and what it needs has been computed.
export function schedule(passes) {
  const ends = new Map();
  const free = new Map();
  const parts = Math.max(...passes.map((pass) => pass[3])) + 1;
  const key = (replica, round, microbatch, part, way) => `${replica}/${round}/${microbatch}/${part}/${way}`;
  return passes.map(([ms, replica, stage, part, round, microbatch, way]) => {
    const lane = `${replica}/${stage}`;
    const before = way === "F" ? [part - 1, "F"] : part === parts - 1 ? [part, "F"] : [part + 1, "B"];
    const tick = Math.max(free.get(lane) ?? 0, ends.get(key(replica, round, microbatch, ...before)) ?? 0);
    free.set(lane, tick + 1);
    ends.set(key(replica, round, microbatch, part, way), tick + 1);
    return { ms, replica, stage, part, round, microbatch, way, tick, lane };
  });
}

export class Schedule {
  constructor(element, note) {
    this.element = element;
    this.note = note;
    this.canvas = make("canvas");
    this.canvas.setAttribute("role", "img");
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", hideTip);
    element.replaceChildren(this.canvas);
    new ResizeObserver(() => this.draw()).observe(element);
  }

  show(passes, round) {
    this.cells = schedule(passes);
    const lanes = [...new Set(this.cells.map((cell) => cell.lane))].sort((a, b) => a.localeCompare(b, undefined, { numeric: true }));
    this.rows = new Map(lanes.map((lane, i) => [lane, i]));
    this.several = new Set(this.cells.map((cell) => cell.replica)).size > 1;
    this.round = round;
    const used = this.cells.length;
    this.ticks = Math.max(...this.cells.map((cell) => cell.tick)) + 1;
    const idle = 1 - used / (this.ticks * lanes.length);
    this.note.textContent = `${used} passes on ${lanes.length} stages; ${Math.round(100 * idle)} % of the places are empty if every pass takes one tick. Filled: forward, outlined: backward, pale: another round.`;
    this.canvas.setAttribute("aria-label", this.note.textContent);
    this.draw();
  }

  draw() {
    if (!this.cells || !this.element.clientWidth) return;
    this.size = Math.max(18, Math.min(34, (this.element.clientWidth - 62) / this.ticks));
    const [width, height] = [60 + this.ticks * this.size, this.rows.size * 26 + 2];
    Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
    const context = prepared(this.canvas, width, height);
    context.textBaseline = "middle";
    context.textAlign = "left";
    context.fillStyle = css("--soft");
    for (const [lane, row] of this.rows) {
      const [replica, stage] = lane.split("/");
      context.fillText(this.several ? `${replica}: stage ${stage}` : `stage ${stage}`, 0, row * 26 + 12);
    }
    context.textAlign = "center";
    for (const cell of this.cells) {
      const [left, top] = [60 + cell.tick * this.size, this.rows.get(cell.lane) * 26];
      const tint = colour(cell.part > cell.stage ? 2 : 0);
      context.globalAlpha = cell.round === this.round ? 1 : 0.4;
      context.fillStyle = context.strokeStyle = tint;
      if (cell.way === "F") context.fillRect(left + 1, top + 1, this.size - 2, 22);
      else {
        context.lineWidth = 1.5;
        context.strokeRect(left + 1.75, top + 1.75, this.size - 3.5, 20.5);
      }
      context.fillStyle = cell.way === "F" ? css("--panel") : tint;
      context.fillText(String(cell.microbatch + 1), left + this.size / 2, top + 12.5);
    }
    context.globalAlpha = 1;
  }

  point(event) {
    const tick = Math.floor((event.offsetX - 60) / this.size);
    const row = Math.floor(event.offsetY / 26);
    const cell = this.cells.find((own) => own.tick === tick && this.rows.get(own.lane) === row);
    if (!cell) return hideTip();
    showTip(event.clientX, event.clientY, `stage ${cell.stage}, part ${cell.part}`, [["microbatch", String(cell.microbatch + 1)], ["pass", cell.way === "F" ? "forward" : "backward"], ["round", String(cell.round)], ["dispatched after", `${number(cell.ms)} ms`]]);
  }
}
