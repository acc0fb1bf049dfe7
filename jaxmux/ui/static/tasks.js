// The list of tasks: search, order, selection by mouse and keyboard.
import { colour, dash, duration, make, number } from "./format.js";

const STATES = ["running", "preparing", "stopped", "queued", "paused", "waiting", "refused", "failed", "succeeded", "stopped early", "cancelled"];

// Whether something is wrong with a task.
export function isIll(row) {
  return row.skipped > 0 || row.error !== null || row.state === "failed";
}

function descending(value) {
  const known = (row) => value(row) ?? -Infinity;
  return (a, b) => (known(a) === known(b) ? 0 : known(b) - known(a));
}

export class TaskList {
  constructor({ onSelect, onHover, onArrange, onOpen }) {
    this.list = document.getElementById("tasks");
    this.search = document.getElementById("search");
    this.sort = document.getElementById("sort");
    Object.assign(this, { onSelect, onHover, onArrange, onOpen });
    Object.assign(this, { rows: [], configurations: new Map() });
    this.items = new Map();
    this.active = null;
    const arrange = () => {
      this.arrange();
      this.onArrange();
    };
    this.search.addEventListener("input", arrange);
    this.sort.addEventListener("change", arrange);
    this.search.addEventListener("keydown", (event) => {
      if (event.key === "ArrowDown") {
        event.preventDefault();
        this.list.focus();
      } else if (event.key === "Escape") {
        this.search.value = "";
        arrange();
      }
    });
    this.list.addEventListener("keydown", (event) => this.key(event));
    this.list.addEventListener("focus", () => this.activate(this.active ?? this.shown()[0]?.dataset.name));
    this.list.addEventListener("blur", () => this.onHover(null));
    this.list.addEventListener("pointerleave", () => this.onHover(null));
  }

  // rows: those of the server. colours: by name of the selected tasks, the place that gives its colour.
  // configurations: by name of a sweep's task, its swept values in words.
  show(rows, colours, configurations) {
    Object.assign(this, { rows, configurations });
    const names = new Set(rows.map((row) => row.name));
    for (const [name, item] of this.items) {
      if (!names.has(name)) {
        item.remove();
        this.items.delete(name);
      }
    }
    for (const row of rows) this.update(row, colours);
    this.arrange();
  }

  update(row, colours) {
    let item = this.items.get(row.name);
    if (!item) {
      item = make("li", { id: `task-${this.items.size}-${row.name}` }, make("i", { className: "swatch" }), make("span", { className: "name", title: row.name }, row.name), make("span", { className: "loss" }), make("span", { className: "sub" }, make("span"), make("span")), make("span", { className: "sub ill" }), make("span", { className: "bar" }, make("i")));
      item.setAttribute("role", "option");
      item.dataset.name = row.name;
      item.addEventListener("click", () => {
        this.activate(row.name);
        this.onSelect(row.name);
      });
      item.children[1].addEventListener("click", (event) => {
        event.stopPropagation();
        this.activate(row.name);
        this.onOpen(row.name);
      });
      item.addEventListener("pointerenter", () => this.onHover(row.name));
      this.items.set(row.name, item);
    }
    const [swatch, name, loss, sub, ill, bar] = item.children;
    const shown = this.configurations.get(row.name) ?? row.name;
    if (name.textContent !== shown) name.textContent = shown;
    const place = colours.get(row.name);
    const selected = place !== undefined;
    item.setAttribute("aria-selected", String(selected));
    swatch.style.background = swatch.style.borderColor = selected ? colour(place) : "";
    swatch.classList.toggle("dashed", selected && dash(place).length > 0);
    // An update is skipped because a value is not finite, so its loss is none to show.
    const held = row.held_out === null ? null : make("small", { title: "held-out loss" }, ` / ${number(row.held_out)}`);
    loss.replaceChildren(row.nan ? "nan" : number(row.loss), ...(held ? [held] : []));
    loss.classList.toggle("failed", row.nan);
    const kind = [row.kind === "lora" ? "LoRA" : row.kind, row.rank && `rank ${row.rank}`].filter(Boolean).join(" ");
    sub.children[0].textContent = [row.state, kind].filter(Boolean).join(" · ");
    sub.children[0].className = ["failed", "refused"].includes(row.state) ? "failed" : "";
    const skipped = row.skipped ? `${row.skipped} ${row.skipped === 1 ? "update" : "updates"} skipped: not finite` : "";
    const change = row.error && !["refused", "waiting"].includes(row.state) ? `change refused: ${row.error}` : row.error;
    ill.textContent = [skipped, row.reason, change].filter(Boolean).join("; ");
    // A task that waits, or has stopped early, is well.
    ill.classList.toggle("calm", !isIll(row));
    ill.hidden = !ill.textContent;
    ill.title = ill.textContent;
    const steps = row.steps ? `${row.step}/${row.steps}` : `step ${row.step}`;
    sub.children[1].textContent = [steps, row.left !== null && `${duration(row.left)} left`].filter(Boolean).join(" · ");
    bar.hidden = !row.steps;
    const share = row.steps ? Math.min(1, row.step / row.steps) : 0;
    bar.firstChild.style.width = `${100 * share}%`;
    bar.firstChild.style.background = selected ? colour(place) : "";
  }

  arrange() {
    const wanted = this.search.value.trim().toLowerCase();
    const orders = {
      given: () => 0,
      name: (a, b) => a.name.localeCompare(b.name, undefined, { numeric: true }),
      // Tasks whose losses are not finite come first, and those without a loss last.
      loss: descending((row) => (row.nan ? Infinity : row.loss)),
      held_out: descending((row) => row.held_out),
      state: (a, b) => STATES.indexOf(a.state) - STATES.indexOf(b.state),
    };
    const rows = [...this.rows].sort(orders[this.sort.value]);
    const found = rows.filter((row) => `${row.name} ${this.configurations.get(row.name) ?? ""} ${row.state} ${row.kind ?? ""}`.toLowerCase().includes(wanted));
    const items = found.map((row) => this.items.get(row.name));
    const same = items.length === this.list.children.length && items.every((item, i) => item === this.list.children[i]);
    if (!same) this.list.replaceChildren(...items);
    const all = this.rows.length;
    document.getElementById("task-count").textContent = found.length === all ? `${all}` : `${found.length} of ${all}`;
  }

  highlight(name) {
    for (const [own, item] of this.items) item.classList.toggle("hot", own === name);
  }

  shown() {
    return [...this.list.children];
  }

  activate(name) {
    if (!name || !this.items.has(name)) return;
    this.items.get(this.active)?.classList.remove("active");
    this.active = name;
    const item = this.items.get(name);
    item.classList.add("active");
    this.list.setAttribute("aria-activedescendant", item.id);
    item.scrollIntoView({ block: "nearest" });
  }

  key(event) {
    const shown = this.shown();
    if (!shown.length) return;
    const now = shown.findIndex((item) => item.dataset.name === this.active);
    const moves = { ArrowDown: now + 1, ArrowUp: now - 1, Home: 0, End: shown.length - 1 };
    if (event.key in moves) {
      event.preventDefault();
      this.activate(shown[Math.min(shown.length - 1, Math.max(0, moves[event.key]))].dataset.name);
      this.onHover(this.active);
    } else if (event.key === " " || event.key === "Enter") {
      event.preventDefault();
      if (this.active === null) return;
      if (event.key === " ") this.onSelect(this.active);
      else this.onOpen(this.active);
    } else if (event.key === "Escape") {
      this.onSelect(null);
    }
  }
}
