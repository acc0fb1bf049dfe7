// The page of a run: asks for its state, then follows the stream of changes.
import { LineChart, prepared, smoothed } from "./chart.js";
import { MOST_COLOURS, clock, colour, configurations, count, css, dash, duration, isDark, labelsOf, make, number, onThemeChange } from "./format.js";
import { TaskDetail } from "./detail.js";
import { Microbatches, Schedule } from "./rounds.js";
import { Sweeps } from "./sweeps.js";
import { TaskList } from "./tasks.js";

const $ = (id) => document.getElementById(id);
// More points than this are merged by the server: the state is asked for anew.
const MOST_POINTS = 1024;
// Characters of a name in a chart.
const LABEL = 17;
const GIB = 2 ** 30;

const page = {
  state: null,
  // Names of the selected tasks, and whether the user, or the address of the page, chose them.
  selected: new Set(),
  chosen: false,
  asIs: true,
  hot: null,
  newest: true,
  details: null,
  asked: null,
  drawing: false,
};

const list = new TaskList({ onSelect: select, onHover: hover, onArrange: () => keepState(), onOpen: openTask });
const sweeps = new Sweeps($("sweeps"), { onOpen: openTask });
const detail = new TaskDetail({ onClose: closedTask });
const loss = new LineChart($("loss-chart"), { label: "Training loss by step", xName: "step", onHover: hover, legendless: true });
const speed = new LineChart($("speed-chart"), { label: "Tokens per second by round", xName: "round", zero: true });
const memory = new LineChart($("memory-chart"), { label: "Memory in GiB by round", xName: "round", zero: true });
const held = new Microbatches($("held-chart"), hover);
const schedule = new Schedule($("schedule-chart"), $("schedule-note"));

const pressed = (id) => $(id).getAttribute("aria-pressed") === "true";
for (const id of ["smooth", "log", "held", "multiples", "newest"]) {
  $(id).addEventListener("click", () => {
    $(id).setAttribute("aria-pressed", String(!pressed(id)));
    if (id === "newest") followNewest();
    keepState();
    draw();
  });
}
$("earlier").addEventListener("click", () => moveRound(-1));
$("later").addEventListener("click", () => moveRound(1));
$("round").addEventListener("input", () => moveRound(0));
onThemeChange(() => {
  schedule.draw();
  draw();
});
// One timer for what changes by itself: how long ago the run was heard of.
setInterval(() => {
  if (!page.state) return;
  header();
  detail.show(page.state);
}, 5000);

function select(name) {
  if (name === null) page.selected.clear();
  else if (page.selected.has(name)) page.selected.delete(name);
  else {
    if (page.selected.size >= MOST_COLOURS) page.selected.delete(page.selected.values().next().value);
    page.selected.add(name);
  }
  page.asIs = false;
  keepState();
  draw();
}

// By name of a selected task its place among all tasks, which gives its colour. So a task has the
// same colour whatever else is selected, and on everybody's page.
function places() {
  return new Map(page.state.tasks.filter((row) => page.selected.has(row.name) && row.place !== null).map((row) => [row.name, row.place]));
}

// What the page shows is in its address, so that it survives a reload and can be sent to others.
// Only what differs from the usual is there.
const TOGGLES = { smooth: true, log: false, held: true, multiples: false };

function keepState({ adds = false } = {}) {
  const parameters = new URLSearchParams();
  if (!page.asIs) for (const name of page.selected.size ? page.selected : [""]) parameters.append("select", name);
  if (list.search.value) parameters.set("search", list.search.value);
  if (list.sort.value !== usualSort()) parameters.set("sort", list.sort.value);
  for (const [id, usual] of Object.entries(TOGGLES)) if (pressed(id) !== usual) parameters.set(id, usual ? "0" : "1");
  if (!page.newest && page.state) parameters.set("round", page.state.details[Number($("round").value)]);
  if (detail.name !== null) parameters.set("task", detail.name);
  const address = `${location.pathname}${parameters.size ? `?${parameters}` : ""}`;
  if (address !== location.pathname + location.search) history[adds ? "pushState" : "replaceState"](adds ? { opened: true } : history.state, "", address);
}

// The button Back closes what a click has opened.
function openTask(name) {
  detail.open(name);
  keepState({ adds: true });
  draw();
}

function closedTask() {
  if (!new URLSearchParams(location.search).has("task")) return;
  if (history.state?.opened) history.back();
  else keepState();
}
addEventListener("popstate", () => {
  detail.open(new URLSearchParams(location.search).get("task"));
  draw();
});

// Takes over the address when the first state of the run has come.
function readAddress() {
  const parameters = new URLSearchParams(location.search);
  if (parameters.has("select")) {
    page.selected = new Set(parameters.getAll("select").filter(Boolean).slice(0, MOST_COLOURS));
    page.chosen = true;
    page.asIs = false;
  }
  list.search.value = parameters.get("search") ?? "";
  const sort = parameters.get("sort") ?? usualSort();
  list.sort.value = [...list.sort.options].some((option) => option.value === sort) ? sort : usualSort();
  for (const [id, usual] of Object.entries(TOGGLES)) {
    const value = { 0: false, 1: true }[parameters.get(id)] ?? usual;
    $(id).setAttribute("aria-pressed", String(value));
  }
  detail.open(parameters.get("task"));
  const round = Number(parameters.get("round") ?? NaN);
  const index = page.state.details.indexOf(round);
  page.newest = index < 0;
  if (index < 0) return;
  $("round").max = page.state.details.length - 1;
  $("round").value = index;
}

// The tasks of a server that train come first.
const usualSort = () => (page.state?.run.kind === "server" ? "state" : "given");

function hover(name) {
  if (name === page.hot) return;
  page.hot = name;
  list.highlight(name);
  draw();
}

function draw() {
  if (page.drawing) return;
  page.drawing = true;
  requestAnimationFrame(() => {
    page.drawing = false;
    if (page.state) drawNow();
  });
}

function drawNow() {
  const { tasks } = page.state;
  const colours = places();
  list.show(tasks, colours, configurations(page.state.sweeps));
  detail.show(page.state);
  sweeps.show(page.state);
  page.labels = labels(tasks.map((row) => row.name));
  header();
  const multiples = pressed("multiples");
  $("grid").hidden = !multiples;
  $("loss-chart").hidden = multiples;
  if (multiples) drawGrid();
  else drawLoss();
  drawRounds();
  const times = `${page.state.version} ${$("time-details").open} ${isDark()}`;
  if (page.times !== times) drawTime();
  page.times = times;
  held.show(page.details?.held ?? (page.state.details.length ? page.details && [] : null), { colours, order: tasks.map((row) => row.name), labels: page.labels, hot: page.hot, trained: page.state.rounds.length > 0 });
}

// Short names of tasks for the charts; found again only when there are other tasks.
let labelled = { key: null };
function labels(names) {
  const key = JSON.stringify([names, Object.keys(page.state.sweeps)]);
  if (key !== labelled.key) labelled = { key, map: labelsOf(names, page.state.sweeps, LABEL) };
  return labelled.map;
}

function lossSeries(name) {
  const points = page.state.loss[name] ?? [];
  return { xs: points.map((point) => point[0]), ys: points.map((point) => point[1]) };
}

function drawLoss() {
  const series = [];
  const many = page.state.tasks.length > MOST_COLOURS;
  const colours = places();
  for (const { name } of page.state.tasks) {
    const { xs, ys } = lossSeries(name);
    if (!xs.length) continue;
    const place = colours.get(name);
    const smooth = pressed("smooth") && xs.length > 8;
    if (place === undefined) {
      series.push({ name, xs, ys: smooth ? smoothed(xs, ys) : ys, colour: css("--idle"), faint: true, alpha: many ? 0.28 : 0.5, width: 1 });
      continue;
    }
    if (smooth) series.push({ name, xs, ys, colour: colour(place), alpha: 0.28, width: 1, label: false });
    series.push({ name, xs, ys: smooth ? smoothed(xs, ys) : ys, colour: colour(place), dash: dash(place), width: 1.8, shown: page.labels.get(name) });
    const points = pressed("held") ? page.state.held_out[name] ?? [] : [];
    series.push({ name, xs: points.map((point) => point[0]), ys: points.map((point) => point[1]), colour: colour(place), marks: true, label: false });
  }
  loss.show(series, { log: pressed("log"), hot: page.hot });
  const others = page.state.tasks.length - colours.size;
  const parts = [];
  if (pressed("held") && colours.size) parts.push("Circles: held-out loss.");
  if (others > 0) parts.push(colours.size ? `Grey: the other ${others} tasks; select them in the list, up to ${MOST_COLOURS}.` : "Select tasks in the list to colour them.");
  if (pressed("smooth")) parts.push("Bold: moving mean of the neighbours on both sides.");
  $("loss-note").textContent = parts.join(" ");
}

function drawGrid() {
  const grid = $("grid");
  const all = page.state.tasks.map(({ name }) => ({ name, ...lossSeries(name) }));
  const colours = places();
  const log = pressed("log");
  const scale = (y) => (log ? Math.log10(Math.max(y, 1e-6)) : y);
  const values = all.flatMap(({ ys }) => ys.map(scale));
  const [low, high] = values.reduce(([a, b], y) => [Math.min(a, y), Math.max(b, y)], [Infinity, -Infinity]);
  if (grid.children.length !== all.length) {
    grid.replaceChildren(
      ...all.map(() => {
        const button = make("button", { type: "button" }, make("span", {}, make("b"), make("em")), make("canvas"));
        button.addEventListener("click", () => select(button.dataset.name));
        button.addEventListener("pointerenter", () => hover(button.dataset.name));
        button.addEventListener("pointerleave", () => hover(null));
        return button;
      }),
    );
  }
  all.forEach(({ name, xs, ys }, i) => {
    const button = grid.children[i];
    button.dataset.name = button.title = name;
    button.setAttribute("aria-pressed", String(page.selected.has(name)));
    button.firstChild.firstChild.textContent = page.labels.get(name);
    button.firstChild.lastChild.textContent = number(ys.at(-1) ?? null, 3);
    const canvas = button.lastChild;
    const { clientWidth: width, clientHeight: height } = canvas;
    if (!width || !ys.length) return;
    const context = prepared(canvas, width, height);
    const line = pressed("smooth") && ys.length > 8 ? smoothed(xs, ys) : ys;
    const place = colours.get(name);
    context.strokeStyle = place === undefined ? css(page.hot === name ? "--ink" : "--idle") : colour(place);
    context.setLineDash(place === undefined ? [] : dash(place));
    context.lineWidth = 1.5;
    context.beginPath();
    line.forEach((y, j) => context.lineTo(1 + ((xs[j] - xs[0]) / Math.max(1, xs.at(-1) - xs[0])) * (width - 2), 2 + (1 - (scale(y) - low) / (high - low || 1)) * (height - 4)));
    context.stroke();
  });
  $("loss-note").textContent = `All tasks with the same scale, from ${number(log ? 10 ** low : low, 3)} to ${number(log ? 10 ** high : high, 3)}${log ? ", logarithmic" : ""}.`;
}

function drawRounds() {
  const { rounds, details } = page.state;
  // [round, time, seconds, tokens, tokens of chunks, tokens read, in use, peak, host, microbatches]
  const after = rounds.filter((row) => row[2] > 0).slice(rounds.length > 3 ? 1 : 0);
  const xs = after.map((row) => row[0]);
  // A round may end late and the next one at once, so tokens and seconds are summed over several.
  const span = Math.max(2, Math.round(after.length / 60));
  const rate = (column) =>
    after.map((_, i) => {
      const near = after.slice(Math.max(0, i - span), i + span + 1);
      return near.reduce((sum, row) => sum + row[column], 0) / near.reduce((sum, row) => sum + row[2], 0);
    });
  speed.show([
    { name: "with padding", xs, ys: rate(3), colour: colour(5), width: 1.4 },
    { name: "without padding", xs, ys: rate(5), colour: colour(0), width: 1.8 },
  ]);
  const kinds = [["device, peak", 7, 1, [5, 3]], ["device, in use", 6, 0], ["host process", 8, 4]];
  memory.show(kinds.filter(([, column]) => rounds.some((row) => row[column] > 0)).map(([name, column, index, dash]) => ({ name, xs: rounds.map((row) => row[0]), ys: rounds.map((row) => row[column] / GIB), colour: colour(index), dash })));
  const slider = $("round");
  slider.max = Math.max(0, details.length - 1);
  if (page.newest) slider.value = slider.max;
  const index = Number(slider.value);
  slider.disabled = $("newest").disabled = details.length < 1;
  slider.setAttribute("aria-valuetext", `round ${details[index] ?? "none"}`);
  $("earlier").disabled = index <= 0;
  $("later").disabled = index >= details.length - 1;
  $("newest").setAttribute("aria-pressed", String(page.newest));
  if (details.length && page.asked !== details[index]) askRound(details[index]);
}

// [part, its name, index of its colour; -1 for grey]
// Files of earlier versions have the last two in place of the four before.
const PARTS = [
  ["read", "forward and backward: tokens that the model reads", 0],
  ["padding", "forward and backward: padding in chunks", 5],
  ["unused", "forward and backward: unused chunks", 6],
  ["evaluation", "evaluation: held-out losses", 2],
  ["checkpoints", "checkpoints and adapters", 3],
  ["compiling", "compiling", 4],
  ["idle", "idle: the devices wait for the host", -1],
  ["first", "first round, beyond the usual", 4],
  ["beyond", "other rounds, beyond the usual", 1],
];

function drawTime() {
  const { run, tasks } = page.state;
  const parts = run.parts;
  $("time").hidden = !parts;
  if (!parts) return;
  const total = Object.values(parts).reduce((sum, seconds) => sum + seconds, 0) || 1;
  const share = (value, whole) => `${((100 * value) / (whole || 1)).toFixed(1)} %`;
  $("time-unit").textContent = `${duration(total)} in rounds`;
  const shown = PARTS.map(([key, name, index]) => ({ name, seconds: Math.max(0, parts[key] ?? 0), tint: index < 0 ? css("--idle") : colour(index) })).filter(({ seconds }) => seconds > 0);
  const painted = (tag, tint) => {
    const made = make(tag);
    made.style.background = tint;
    return made;
  };
  $("time-bar").replaceChildren(
    ...shown.map(({ seconds, tint }) => {
      const piece = painted("i", tint);
      piece.style.flexGrow = seconds;
      return piece;
    }),
  );
  $("time-note").textContent = "beyond" in parts ? "An earlier version has recorded rounds without what their time was spent on. The first round compiles; evaluations and checkpoints are in the rounds that take longer than usual." : "Updates are part of forward and backward. Saving that goes on beside training takes no time of the devices.";
  $("time-bar").setAttribute("aria-label", shown.map(({ name, seconds }) => `${name}: ${share(seconds, total)}`).join(", "));
  $("time-parts").replaceChildren(...shown.map(({ name, seconds, tint }) => make("li", {}, painted("i", tint), `${name} `, make("b", {}, share(seconds, total)), ` ${duration(seconds)}`)));
  if (!$("time-details").open) return;
  const tokens = tasks.reduce((sum, row) => sum + row.tokens, 0);
  const most = [...tasks].sort((a, b) => b.seconds - a.seconds).slice(0, 200);
  $("time-tasks").replaceChildren(...most.map((row) => make("tr", {}, make("td", {}, taskButton(row.name)), ...[duration(row.seconds), share(row.seconds, total), count(row.tokens), share(row.tokens, tokens)].map((text) => make("td", {}, text)))));
}
$("time-details").addEventListener("toggle", () => draw());

function moveRound(by) {
  const slider = $("round");
  slider.value = Number(slider.value) + by;
  page.newest = Number(slider.value) === Number(slider.max);
  keepState();
  draw();
}

function followNewest() {
  page.newest = true;
}

async function askRound(number_) {
  page.asked = number_;
  const response = await fetch(`/api/rounds/${number_}`).catch(() => null);
  if (page.asked !== number_) return;
  page.details = response?.ok ? await response.json() : null;
  showRound();
  draw();
}

function showRound() {
  const own = page.details;
  $("round-unit").textContent = own ? `round ${own.round}` : "";
  $("schedule").hidden = !own?.passes?.length;
  if (own?.passes?.length) schedule.show(own.passes, own.round);
  if (!own) return ($("held-note").textContent = "");
  const [padding, chunks] = [1 - own.read_tokens / own.tokens, own.tokens - own.chunk_tokens];
  const more = own.microbatches > 64 ? ` The first 64 of ${own.microbatches} microbatches are shown.` : "";
  $("held-note").textContent = own.tokens
    ? `${count(own.tokens)} tokens computed, ${count(own.read_tokens)} of them read: ${(100 * padding).toFixed(1)} % padding (${count(own.chunk_tokens - own.read_tokens)} within chunks, ${count(chunks)} in unused chunks). Solid: read, pale: padding of a task's chunks.${more}`
    : "";
}

function header() {
  const { run, tasks, rounds, events } = page.state;
  document.title = `${run.name} · jaxmux`;
  $("name").textContent = run.name;
  $("name").title = run.path;
  const [status, text] = statusOf(run, rounds, tasks);
  $("status").className = `status ${status}`;
  if ($("status").textContent !== text) $("status").textContent = text;
  const shape = run.shape.rows ? `${run.shape.rows} × ${run.shape.row_len} tokens, chunks of ${run.shape.chunk_len}` : "";
  $("about").textContent = [run.kind === "server" ? "server" : "training run", run.backbone, run.format, shape].filter(Boolean).join(" · ");
  const states = Map.groupBy(tasks, (row) => row.state);
  const many = (state) => states.get(state)?.length ?? 0;
  const trained = tasks.filter((row) => !["refused", "waiting"].includes(row.state)).length;
  const others = ["stopped early", "failed", "cancelled"].filter(many).map((state) => `, ${many(state)} ${state}`).join("");
  // While a run trains, its last rounds tell how fast it is; afterwards, the whole run does.
  const late = run.state === "training" ? rounds.slice(Math.max(1, Math.floor(rounds.length / 2))) : [];
  const sum = (column) => late.reduce((total, row) => total + row[column], 0);
  const all = run.trained;
  const [seconds, computed, read] = sum(2) ? [sum(2), sum(3), sum(5)] : [all.seconds, all.tokens, all.read];
  const count_ = sum(2) ? late.length : rounds.length ? rounds.at(-1)[0] + 1 : 0;
  const peak = Math.max(0, ...rounds.map((row) => row[7]), run.summary?.peak_memory_bytes ?? 0);
  const figures = [
    ["Tasks succeeded", `${many("succeeded")}`, `of ${trained}${others}`],
    ["Rounds", rounds.length ? count(rounds.at(-1)[0] + 1) : "–"],
    ["Tokens per second", seconds ? number(read / seconds, 3) : "–", "without padding"],
    ["Padding", computed ? ((1 - read / computed) * 100).toFixed(1) : "–", computed ? "%" : null],
    ["Time of a round", seconds ? duration(seconds / count_) : "–"],
    ["Device memory, peak", peak ? number(peak / GIB, 3) : "–", peak ? "GiB" : "not reported"],
    ["Time trained", duration(run.summary?.wall_seconds ?? all.seconds)],
  ];
  if (run.refused) figures.splice(1, 0, ["Refused or waiting", `${run.refused}`, "specifications"]);
  const left = Math.max(0, ...tasks.map((row) => row.left ?? 0));
  if (left) figures.push(["Time left", duration(left), "about"]);
  $("figures").replaceChildren(...figures.map(([name, value, unit]) => make("div", {}, make("dt", {}, name), make("dd", {}, value, unit ? make("small", {}, unit) : null))));
  const damaged = Object.entries(run.damaged).map(([file, count]) => `${file}: ${count} damaged ${count === 1 ? "line is" : "lines are"} left out.`);
  if (run.unread > 0) damaged.push(`${number(run.unread / 2 ** 20, 3)} MiB have yet to be read.`);
  $("failure").hidden = !run.failure;
  $("failure").textContent = run.failure ? `The process failed: ${run.failure}` : "";
  $("notice").hidden = !damaged.length;
  if ($("notice").textContent !== damaged.join(" ")) $("notice").textContent = damaged.join(" ");
  $("events-count").textContent = events.length ? `the last ${events.length}` : "";
  drawEvents(events);
}

const STATES = {
  waiting: "waiting for the run to begin",
  compiling: "loading and compiling",
  training: "training",
  idle: "idle: nothing to train",
  stopped: "stopped",
  failed: "failed",
  lost: "lost: its process was killed",
};

function statusOf(run, rounds, tasks) {
  if (run.state === "finished") return tasks.some((row) => row.state === "failed") ? ["failed", "finished, with failed tasks"] : ["finished", "finished"];
  if (run.state !== "unknown") return [{ training: "running", compiling: "running", lost: "failed", failed: "failed" }[run.state] ?? "", STATES[run.state]];
  // Files without a lock were copied, or their file system has none: only their age tells.
  if (run.last === null) return ["", "nothing trained yet"];
  const age = run.now - run.last + (Date.now() - page.received) / 1000;
  const usual = rounds.length ? rounds.at(-1)[2] : 0;
  if (age < Math.max(60, 20 * usual)) return ["running", "training"];
  return ["", `no news for ${duration(age)}`];
}

// A task's name that opens it.
function taskButton(name) {
  const button = make("button", { type: "button", className: "link" }, name);
  button.addEventListener("click", () => openTask(name));
  return button;
}

function drawEvents(events) {
  const body = $("events");
  const newest = events.at(-1);
  const key = !newest ? "none" : `${events.length} ${newest.time} ${newest.task} ${newest.text}`;
  if (body.dataset.key === key) return;
  body.dataset.key = key;
  if (!newest) return body.replaceChildren(make("tr", {}, make("td", { colSpan: 3, className: "empty" }, "nothing has happened yet")));
  body.replaceChildren(...[...events].reverse().map((event) => make("tr", {}, make("td", {}, clock(event.time)), make("td", {}, taskButton(event.task)), make("td", {}, event.kind === "held-out" ? `held-out ${event.text}` : event.text))));
}

function add(change) {
  const { state } = page;
  state.version = change.version;
  state.run = change.run;
  page.received = Date.now();
  const gone = new Set(change.gone);
  if (gone.size) state.tasks = state.tasks.filter((row) => !gone.has(row.name));
  for (const name of gone) {
    page.selected.delete(name);
    delete state.loss[name];
    delete state.held_out[name];
  }
  for (const row of change.tasks) {
    const index = state.tasks.findIndex((own) => own.name === row.name);
    if (index < 0) state.tasks.push(row);
    else state.tasks[index] = row;
  }
  for (const kind of ["loss", "held_out"]) {
    for (const [name, points] of Object.entries(change[kind])) {
      (state[kind][name] ??= []).push(...points);
      if (state[kind][name].length > MOST_POINTS) return load();
    }
  }
  state.rounds.push(...change.rounds);
  state.details.push(...change.details);
  state.events = [...state.events, ...change.events].slice(-300);
  if (state.rounds.length > MOST_POINTS) return load();
  choose();
  draw();
}

// At first some tasks are coloured, so that the page begins with a picture. Those of a server that
// train come first.
function choose() {
  if (page.chosen || !page.state.tasks.length) return;
  page.chosen = true;
  const few = page.state.tasks.length <= MOST_COLOURS ? MOST_COLOURS : 5;
  const first = [...page.state.tasks].sort((a, b) => (b.state === "running") - (a.state === "running"));
  page.selected = new Set(first.slice(0, few).map(({ name }) => name));
}

let loading = null;
function load() {
  loading ??= fetchState().finally(() => (loading = null));
  return loading;
}

async function fetchState() {
  stream?.close();
  try {
    const response = await fetch("/api/state");
    if (!response.ok) throw new Error(`the server answers ${response.status}`);
    page.state = await response.json();
  } catch (error) {
    $("status").className = "status failed";
    $("status").textContent = "the server of this page has ended";
    setTimeout(load, 3000);
    return;
  }
  page.received = Date.now();
  page.asked = null;
  // Before the run has begun, its tasks and rounds are not known.
  if (!page.addressRead && page.state.run.kind !== "waiting") {
    page.addressRead = true;
    readAddress();
  }
  choose();
  draw();
  follow();
}

let stream = null;
function follow() {
  stream = new EventSource(`/api/stream?since=${page.state.version}`);
  stream.onmessage = ({ data }) => {
    const change = JSON.parse(data);
    if (change.reload) {
      stream.close();
      // Large files are read piece by piece, and each piece changes everything.
      setTimeout(load, 700);
    } else if (change.version > page.state.version) add(change);
  };
  stream.onerror = () => {
    stream.close();
    setTimeout(load, 2000);
  };
}

load();
