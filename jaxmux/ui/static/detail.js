// All about one task, in a window over the page.
import { LineChart, smoothed } from "./chart.js";
import { colour, count, duration, make, number } from "./format.js";
import { isIll } from "./tasks.js";

const $ = (id) => document.getElementById(id);
// While a task trains, its curves are asked for again after so many milliseconds.
const EVERY = 2000;

export class TaskDetail {
  // onClose: called when the user closes the window.
  constructor({ onClose }) {
    this.dialog = $("detail");
    this.loss = new LineChart($("detail-loss"), { label: "Loss by step", xName: "step", bare: true });
    this.rate = new LineChart($("detail-rate"), { label: "Learning rate by step", xName: "step", zero: true, bare: true });
    this.norm = new LineChart($("detail-norm"), { label: "Norm of the gradient by step", xName: "step", zero: true, bare: true });
    this.name = null;
    $("detail-close").addEventListener("click", () => this.dialog.close());
    // A click beside the window closes it, as Escape does.
    this.dialog.addEventListener("click", (event) => event.target === this.dialog && this.dialog.close());
    this.dialog.addEventListener("close", () => {
      this.name = null;
      document.body.append($("tip"));
      $("tip").hidden = true;
      onClose();
    });
  }

  // Opens the window, or closes it if there is no name.
  open(name) {
    if (name === this.name) return;
    if (name === null) return this.dialog.close();
    Object.assign(this, { name, more: null, askedAt: 0, asked: null });
    $("detail-specification").replaceChildren();
    this.samples([]);
    if (!this.dialog.open) this.dialog.showModal();
    // What is not in the window is beneath it.
    this.dialog.append($("tip"));
    this.dialog.scrollTop = 0;
  }

  // state: that of the page.
  show(state) {
    if (this.name === null) return;
    const row = state.tasks.find((own) => own.name === this.name);
    $("detail-name").textContent = this.name;
    if (!row) {
      $("detail-ill").textContent = "The run has no task of this name, or has forgotten it.";
      $("detail-ill").hidden = false;
      $("detail-figures").hidden = $("detail-curves").hidden = true;
      return;
    }
    $("detail-figures").hidden = false;
    this.figures(row);
    this.curves(row, state);
    const key = `${state.version} ${row.step} ${row.state}`;
    if (key !== this.asked && Date.now() - this.askedAt > EVERY) this.ask(key, state);
  }

  async ask(key, state) {
    const name = this.name;
    Object.assign(this, { asked: key, askedAt: Date.now() });
    const response = await fetch(`/api/task?name=${encodeURIComponent(name)}`).catch(() => null);
    if (!response?.ok || name !== this.name) return;
    this.more = await response.json();
    if (name !== this.name) return;
    this.specification(this.more.specification);
    this.samples(this.more.samples);
    this.show(state);
  }

  figures(row) {
    const { skips = [], result, adapter } = this.more ?? {};
    const at = skips.slice(-3).map(([step, why]) => `step ${step}: ${why}`);
    const ill = [row.error, row.reason, row.skipped ? `${count(row.skipped)} ${row.skipped === 1 ? "update" : "updates"} skipped${at.length ? `, the last at ${at.join("; ")}` : ""}.` : null];
    $("detail-ill").textContent = ill.filter(Boolean).join(" · ");
    $("detail-ill").classList.toggle("calm", !isIll(row));
    $("detail-ill").hidden = !$("detail-ill").textContent;
    const figures = [
      ["State", row.state],
      ["Adapter", [row.kind === "lora" ? "LoRA" : row.kind, row.rank && `rank ${row.rank}`].filter(Boolean).join(", ") || "–"],
      ["Step", count(row.step), [row.steps && `of ${count(row.steps)}`, row.left !== null && `${duration(row.left)} left`].filter(Boolean).join(", ")],
      ["Loss", row.nan ? "nan" : number(row.loss)],
      ["Held-out loss", number(result?.eval_loss ?? row.held_out), result?.eval_loss_first ? `${number(result.eval_loss_first)} before` : null],
      ...(row.metric === "loss" ? [] : [[`Held-out ${row.metric}`, number(row.final_value ?? row.value)]]),
      ["Best step", result?.best_step ?? row.best ?? "–", row.metric === "loss" ? null : `by ${row.metric}`],
      ["Tokens read", number(row.tokens)],
      ["Skipped updates", count(row.skipped)],
      ["Adapter's folder", adapter ?? "not written yet"],
    ];
    $("detail-figures").replaceChildren(...figures.map(([name, value, unit]) => make("div", { className: name === "Adapter's folder" ? "path" : "" }, make("dt", {}, name), make("dd", {}, String(value), unit ? make("small", {}, unit) : null))));
  }

  curves(row, state) {
    const tint = colour(row.place ?? 0);
    const line = (points, fields) => ({ name: row.name, xs: points.map((point) => point[0]), ys: points.map((point) => point[1]), colour: tint, ...fields });
    const points = state.loss[row.name] ?? [];
    const raw = line(points, { name: "loss" });
    const series = [raw];
    if (points.length > 8) series.unshift({ ...raw, name: "moving mean", ys: smoothed(raw.xs, raw.ys), width: 2 });
    if (points.length > 8) Object.assign(raw, { alpha: 0.35, width: 1 });
    const held = line(state.held_out[row.name] ?? [], { name: "held-out", marks: true, label: false });
    $("detail-curves").hidden = !points.length && !held.xs.length;
    this.loss.show([...series, held]);
    this.rate.show([line(this.more?.rate ?? [], { name: "learning rate" })]);
    this.norm.show([line(this.more?.norm ?? [], { name: "norm" })]);
  }

  // Each prompt with its completions, that of the bare backbone first.
  samples(samples) {
    $("detail-answers").hidden = !samples.length;
    const prompts = Map.groupBy(samples, ([, prompt]) => prompt);
    const answer = ([step, , text]) => [make("dt", {}, step ? `after step ${count(step)}` : "without the adapter"), make("dd", {}, text)];
    $("detail-samples").replaceChildren(...[...prompts].map(([prompt, own]) => make("dl", { className: "answers" }, make("dt", {}, "prompt"), make("dd", {}, prompt), ...own.flatMap(answer))));
  }

  specification(specification) {
    const rows = specification ? flat(specification) : [];
    const empty = make("tr", {}, make("td", { className: "empty" }, "No file of the run tells what this task is trained with."));
    $("detail-specification").replaceChildren(...(rows.length ? rows.map(([path, value]) => make("tr", {}, make("th", { scope: "row" }, path), make("td", {}, value))) : [empty]));
  }
}

// Paths and values of an object; fields that are null, or empty, are not set.
function flat(value, path = "") {
  if (value === null || (typeof value === "object" && !Object.keys(value).length)) return [];
  if (Array.isArray(value) && value.every((own) => typeof own !== "object")) return [[path, value.join(", ")]];
  if (typeof value !== "object") return [[path, String(value)]];
  return Object.entries(value).flatMap(([key, inner]) => flat(inner, path ? `${path}.${key}` : key));
}
