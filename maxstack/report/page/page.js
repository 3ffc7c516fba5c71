"use strict";

// Okabe and Ito's colours, which those who see few colours tell apart; dashes from the seventh run on.
const COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9"];
const TIME = {
  "useful": "#009e73", "data wait": "#e69f00", "start-up": "#8da0b3", "compile": "#56b4e9", "restore": "#0072b2",
  "save": "#5e4fa2", "evaluation": "#cc79a7", "check": "#b8860b", "lost work": "#d55e00", "idle": "#a4161a", "other": "#7a7f87",
};
const MARKS = {
  "spike": ["S", "--spike", "refused as a spike"], "not finite": ["N", "--spike", "refused as not finite"],
  "rewind": ["W", "--rewind", "went back to here (rewind)"], "resume": ["R", "--resume", "went on from here (resume)"],
  "passed over": ["", "--rewind", "shaded: batches passed over"], "checkpoint": ["", "--faint", "ticks below: checkpoints"],
};
// Key of metrics.jsonl: section, title, unit, factor.
const FIGURES = {
  loss: ["Learning", "Training loss"], accuracy: ["Learning", "Training accuracy", "%", 100], reward: ["Learning", "Reward"],
  learning_rate: ["Optimizer", "Learning rate"], grad_norm: ["Optimizer", "Gradient norm"],
  tokens_per_second: ["Speed", "Throughput", "tokens/s"], images_per_second: ["Speed", "Throughput", "images/s"],
  step_seconds: ["Speed", "Time of a step", "s"], mfu: ["Speed", "Model FLOPs utilization", "% of peak", 100],
  data_wait: ["Speed", "Data wait", "% of a step", 100], goodput: ["Speed", "Goodput so far", "% of all time", 100],
  device_skew: ["Stragglers", "Slowest device", "times the others' median"],
  host_skew: ["Stragglers", "All wait for one process", "% of a step", 100],
  eval_loss: ["Learning", "Held-out loss"], eval_bits_per_byte: ["Learning", "Held-out bits per byte", "bits"],
  eval_accuracy: ["Learning", "Held-out accuracy", "%", 100], eval_reward: ["Learning", "Held-out reward"],
};
const NOT_DRAWN = /^(tokens|skipped|refused|weight|passed_over|eval_(seconds|tokens|images|bytes|prompts|rows)|tasks\/.*_stderr)$/;
const SECTIONS = ["Learning", "Tasks", "Optimizer", "Speed", "Stragglers"];

let data = JSON.parse(document.getElementById("data").textContent);
let charts = [], zoom = null, problem = "";
const shown = { log: false, marks: true }, opened = new Set();

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** An element with attributes, or properties where these begin with a dot, and children: elements or texts. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith(".")) element[name.slice(1)] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.flat(9).filter((child) => child !== null));
  return element;
}

function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e9) return value.toLocaleString("en");
  if (size >= 1e6) return new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 }).format(value);
  if (size < 1e-3) return value.toExponential(2);
  return new Intl.NumberFormat("en", { maximumSignificantDigits: 4 }).format(value);
}

/** As `number`, short enough for an axis. */
function tick(value) {
  if (value === null || Math.abs(value) < 1e4) return value === null ? "" : number(value);
  return new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 }).format(value);
}

function duration(seconds) {
  if (seconds < 100) return `${seconds.toFixed(1)} s`;
  const minutes = Math.round(seconds / 60), hours = Math.floor(minutes / 60), days = Math.floor(hours / 24);
  return days ? `${days} d ${hours % 24} h` : hours ? `${hours} h ${minutes % 60} min` : `${minutes} min`;
}

function table(headings, rows, mark = () => "") {
  const body = rows.map((cells) => make("tr", { class: mark(cells) }, cells.map((cell) => {
    const isNumber = typeof cell === "number" || /^[+-]?[0-9][0-9,]*(\.[0-9]+)?(e[+-][0-9]+)?( (s|%|[KMGT]?i?B))?$/.test(cell);
    return make("td", isNumber ? { class: "number" } : {}, typeof cell === "number" ? number(cell) : `${cell ?? ""}`);
  })));
  const head = make("tr", {}, headings.map((text) => make("th", { scope: "col" }, text)));
  return make("div", { class: "wide" }, make("table", { class: "data" }, make("thead", {}, head), make("tbody", {}, body)));
}

/** What may be long, in a box of its own that the keyboard scrolls. */
function long(content, label) {
  for (const [name, value] of Object.entries({ tabindex: 0, role: "region", "aria-label": label })) content.setAttribute(name, value);
  content.classList.add("long");
  return content;
}

const section = (title, ...children) => make("section", { "aria-label": title }, make("h2", {}, title), ...children);

/** A section that is closed at first; `fill` makes its content once it is open. */
function closed(title, fill) {
  const details = make("details", { id: `details-${title}` }, make("summary", {}, title));
  const open = () => { if (details.open && details.children.length === 1) details.append(...[fill()].flat()); };
  details.addEventListener("toggle", () => { opened[details.open ? "add" : "delete"](title); open(); });
  details.open = opened.has(title);
  open();
  return details;
}

/** Smallest, largest and last value of a figure of a run; null where it has none. */
function extremes(run, key) {
  const [steps, values] = run.series[key] ?? [[], []];
  if (!values.length) return null;
  let low = 0, high = 0;
  values.forEach((value, i) => { if (value < values[low]) low = i; if (value > values[high]) high = i; });
  const point = (i) => ({ step: steps[i], value: values[i] });
  return { least: point(low), most: point(high), last: point(values.length - 1) };
}

function cards(run) {
  const percent = (value) => `${(100 * value).toFixed(1)} %`;
  const found = [["State", run.state, run.why, run.state]];
  found.push(["Step", number(run.step), run.steps ? `of ${number(run.steps)}, ${percent(run.step / run.steps)}` : ""]);
  if (run.loss !== null) found.push(["Training loss", number(run.loss), "mean of the last steps"]);
  for (const [key, best] of [["eval_loss", "least"], ["eval_reward", "most"], ["eval_accuracy", "most"], ["tasks/core", "most"]]) {
    const held = extremes(run, key);
    if (held) found.push([titled(run, key).title, number(held.last.value * titled(run, key).factor),
      `last; best ${number(held[best].value * titled(run, key).factor)} at step ${number(held[best].step)}`]);
  }
  if (run.rate) found.push(["Speed", number(run.rate[0]), `${run.rate[1]}, mean of the last steps`]);
  if (run.mfu !== null) found.push(["MFU", percent(run.mfu), "mean of the last steps"]);
  if (run.tokens) found.push(["Tokens", number(run.tokens), "since the start of the run"]);
  if (run.left !== null) found.push(["Time left", duration(run.left), "at this speed"]);
  if (run.goodput) found.push(["Goodput", percent(run.goodput.causes[0][1] / run.goodput.wall), `of ${duration(run.goodput.wall)}`]);
  return found;
}

/** Section, title, unit and factor of a figure. */
function titled(run, key) {
  const task = /^tasks\/(.*)$/.exec(key);
  const [section, title, unit, factor] = FIGURES[key] ?? (task ? ["Tasks", task[1]] : ["", key]);
  const isLoss = key === "loss" || key === "eval_loss";
  return { section, title, unit: unit ?? (isLoss ? run.unit : ""), factor: factor ?? 1 };
}

/** Draws what happened at steps over a chart, and checkpoints as ticks. */
function drawMarks(u) {
  if (!shown.marks) return;
  const { ctx, bbox } = u, ratio = devicePixelRatio;
  const [low, high] = [u.scales.x.min, u.scales.x.max];
  ctx.save();
  ctx.lineWidth = ratio;
  ctx.font = `${11 * ratio}px system-ui, sans-serif`;
  ctx.textAlign = "center";
  data.runs.forEach((run, i) => {
    const visible = run.events.filter(([step]) => step >= low && step <= high);
    for (const [step, kind] of visible) {
      const [letter, variable] = MARKS[kind];
      const at = Math.round(u.valToPos(step, "x", true));
      ctx.strokeStyle = ctx.fillStyle = data.runs.length > 1 ? COLORS[i % COLORS.length] : css(variable);
      if (kind === "passed over") {
        const width = Math.max(u.valToPos(step + 1, "x", true) - u.valToPos(step, "x", true), ratio);
        ctx.globalAlpha = .2;
        ctx.fillRect(at - width / 2, bbox.top, width, bbox.height);
      } else if (kind === "checkpoint") {
        ctx.globalAlpha = .9;
        ctx.fillRect(at - ratio / 2, bbox.top + bbox.height - 7 * ratio, 1.5 * ratio, 7 * ratio);
      } else {
        ctx.globalAlpha = .8;
        ctx.setLineDash(kind === "rewind" ? [2 * ratio, 3 * ratio] : kind === "resume" ? [6 * ratio, 3 * ratio] : []);
        ctx.beginPath();
        ctx.moveTo(at, bbox.top);
        ctx.lineTo(at, bbox.top + bbox.height);
        ctx.stroke();
        ctx.setLineDash([]);
        if (visible.length < 200) ctx.fillText(letter, at, bbox.top - 3 * ratio);
      }
      ctx.globalAlpha = 1;
    }
  });
  ctx.restore();
}

function setZoom(range) {
  zoom = range;
  for (const u of charts) u.setData(u.data);
  document.getElementById("reset").hidden = zoom === null;
}

/** A figure of all runs over steps. */
function chart(key) {
  const { title, unit, factor } = titled(data.runs[0], key);
  const runs = data.runs.map((run, i) => ({ run, i })).filter(({ run }) => run.series[key]);
  // A figure that is thinned is drawn twice: its smallest and largest values faintly, its means over them.
  const lines = runs.flatMap(({ run, i }) => [[run.series[key], run.means[key] ? "80" : "", i], ...(run.means[key] ? [[run.means[key], "", i]] : [])]);
  const columns = uPlot.join(lines.map(([[steps, values]]) => [steps, values.map((value) => value * factor)]));
  const positive = columns.slice(1).every((values) => values.every((value) => value === null || value === undefined || value > 0));
  const words = runs.map(({ run }) => {
    const found = extremes(run, key);
    return `${run.name}: ${number(found.last.value * factor)} at step ${found.last.step}, from ${number(found.least.value * factor)} to ${number(found.most.value * factor)}`;
  });
  const log = shown.log && positive;
  const caption = make("figcaption", {}, title, " ", make("span", {}, [unit, log ? "logarithmic" : ""].filter(Boolean).join(", ")));
  const plot = make("div", { class: "plot", tabindex: 0, role: "img", id: `plot-${key}`, "aria-label": `${title}${unit ? `, ${unit}` : ""}, by step. ${words.join(". ")}` });
  const all = data.runs.flatMap((run) => Object.values(run.series).map(([steps]) => steps)).filter((steps) => steps.length);
  const ends = [Math.min(...all.map((steps) => steps[0])), Math.max(...all.map((steps) => steps.at(-1)))];
  const axis = { stroke: css("--faint"), grid: { stroke: css("--grid"), width: 1 }, ticks: { stroke: css("--grid"), width: 1 } };
  const options = {
    width: 400, height: 230,
    cursor: { sync: { key: "steps" }, drag: { setScale: false }, points: { size: 7 } },
    scales: { x: { time: false, range: () => zoom ?? (ends[0] < ends[1] ? ends : [ends[0] - 1, ends[0] + 1]) }, y: { distr: log ? 3 : 1 } },
    axes: [{ ...axis, size: 34, values: (u, ticks) => ticks.map((step) => (Number.isInteger(step) ? tick(step) : "")) },
      { ...axis, size: 60, values: (u, ticks) => ticks.map(tick) }],
    series: [{ label: "step", value: (u, value) => number(value) }, ...lines.map(([, faint, i]) => ({
      label: `${data.runs[i].name}${faint ? ", extremes" : data.runs[i].means[key] ? ", mean" : ""}`,
      stroke: COLORS[i % COLORS.length] + faint, width: faint ? 1 : 1.5, spanGaps: true,
      dash: i < COLORS.length ? undefined : [6, 3], value: (u, value) => number(value),
      points: { show: columns[0].length <= 60, size: 5 },
    }))],
    padding: [14, 18, null, null],
    hooks: {
      drawAxes: [drawMarks],
      setSelect: [(u) => {
        if (u.select.width > 3) setZoom([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]);
        u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
      }],
    },
  };
  const figure = make("figure", {}, caption, plot);
  queueMicrotask(() => {
    const u = new uPlot({ ...options, width: plot.clientWidth || 400 }, columns, plot);
    u.over.addEventListener("dblclick", () => setZoom(null));
    charts.push(u);
    const resized = new ResizeObserver(() => { if (plot.clientWidth && plot.clientWidth !== u.width) u.setSize({ width: plot.clientWidth, height: options.height }); });
    resized.observe(plot);
    plot.addEventListener("keydown", (event) => {
      const way = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
      if (event.key === "Escape") setZoom(null);
      if (way === undefined) return;
      event.preventDefault();
      const last = columns[0].length - 1;
      const index = Math.min(Math.max((u.cursor.idx ?? (way > 0 ? -1 : last + 1)) + way, 0), last);
      u.setCursor({ left: u.valToPos(columns[0][index], "x"), top: 10 });
    });
  });
  return figure;
}

const drawn = (keys) => make("div", { class: "charts" }, keys.map(chart));

function markKey() {
  const kinds = Object.keys(MARKS).filter((kind) => data.runs.some((run) => run.events.some(([, other]) => other === kind)));
  return make("ul", { class: "key", id: "marks" }, kinds.map((kind) => {
    const [letter, variable, words] = MARKS[kind];
    const item = make("li", { "data-kind": kind }, letter ? make("b", {}, letter) : null, words);
    item.style.color = data.runs.length > 1 ? "" : css(variable);
    return item;
  }));
}

function tasks() {
  const rows = data.runs.flatMap((run) => Object.keys(run.series).filter((key) => /^tasks\//.test(key) && !NOT_DRAWN.test(key)).map((key) => {
    const found = extremes(run, key), error = extremes(run, `${key}_stderr`);
    return [run.name, key.slice(6), found.last.value, error ? `± ${number(error.last.value)}` : "", found.last.step, found.most.value, found.most.step];
  }));
  return table(["run", "task", "last", "", "step", "highest", "step"], rows);
}

function time(run) {
  if (!run.goodput) return null;
  const { causes, wall, sentence } = run.goodput;
  const spent = causes.filter(([, seconds]) => seconds > 0);
  const bar = make("div", { class: "bar", role: "img", "aria-label": spent.map(([cause, seconds]) => `${cause} ${(100 * seconds / wall).toFixed(1)} %`).join(", ") }, spent.map(([cause, seconds]) => {
    const part = make("div", { title: `${cause}: ${duration(seconds)}` });
    part.style.width = `${100 * seconds / wall}%`;
    part.style.background = TIME[cause];
    return part;
  }));
  const rows = table(["cause", "time", "share", ""], spent.map(([cause, seconds, why]) => [cause, duration(seconds), `${(100 * seconds / wall).toFixed(1)} %`, why]));
  rows.querySelectorAll("tbody tr td:first-child").forEach((cell, i) => {
    const swatch = make("span", { class: "swatch" });
    swatch.style.background = TIME[spent[i][0]];
    cell.prepend(swatch);
  });
  return [make("p", {}, sentence), bar, rows];
}

/** What each run has of something, with its name above where there are several; null where none has any. */
function each(title, content) {
  const parts = data.runs.map((run) => [run, content(run)]).filter(([, part]) => part);
  if (!parts.length) return null;
  return section(title, parts.map(([run, part]) => [data.runs.length > 1 ? make("h3", {}, run.name) : null, part].flat()).flat());
}

function samples(run) {
  if (!run.texts.length && !run.pictures.length) return null;
  const texts = run.texts.map(([step, text]) => make("div", {}, make("p", { class: "faint" }, `step ${number(step)}`), make("pre", { tabindex: 0 }, text)));
  const pictures = run.pictures.map(([name, url]) => make("figure", {}, make("img", { src: url, alt: `samples, ${name}` }), make("p", { class: "faint" }, name)));
  return [make("div", { class: "pictures" }, pictures), ...texts];
}

function overview() {
  const found = data.runs.map(cards);
  if (found.length === 1) {
    return make("dl", { class: "cards" }, found[0].map(([label, value, more, style]) =>
      make("div", {}, make("dt", {}, label), make("dd", { class: style ?? "" }, value, make("small", {}, more)))));
  }
  const labels = [...new Set(found.flat().map(([label]) => label))];
  const rows = labels.map((label) => [label, ...found.map((own) => {
    const card = own.find(([other]) => other === label);
    return card ? card.slice(1, 3).filter(Boolean).join("; ") : "";
  })]);
  const cells = table(["", ...data.runs.map((run) => run.name)], rows);
  [...cells.querySelectorAll("th")].slice(1).forEach((cell, i) => {
    const swatch = make("span", { class: "swatch" });
    swatch.style.background = COLORS[i % COLORS.length];
    cell.prepend(swatch);
  });
  return cells;
}

function controls() {
  const check = (name, label) => {
    const box = make("input", { type: "checkbox", id: `${name}-shown`, ".checked": shown[name] });
    box.addEventListener("change", () => { shown[name] = box.checked; render(); });
    return make("label", {}, box, ` ${label}`);
  };
  const reset = make("button", { type: "button", id: "reset", ".hidden": zoom === null }, "All steps");
  reset.addEventListener("click", () => setZoom(null));
  return make("div", { class: "controls" }, reset, check("log", "logarithmic"), check("marks", "marks"));
}

function render() {
  const focused = document.activeElement?.id;
  for (const u of charts) u.destroy();
  charts = [];
  const keys = [...new Set(data.runs.flatMap((run) => Object.keys(run.series)))].filter((key) => !NOT_DRAWN.test(key));
  const order = Object.keys(FIGURES);
  keys.sort((a, b) => (order.indexOf(a) + 1 || 99) - (order.indexOf(b) + 1 || 99) || (a < b ? -1 : 1));
  const of = (name) => keys.filter((key) => titled(data.runs[0], key).section === name);
  const names = data.runs.map((run) => run.name), several = names.length > 1;
  const remarks = data.runs.flatMap((run) => run.remarks.map((remark) => make("p", { class: "remark" }, several ? `${run.name}: ${remark}` : remark)));
  const sections = SECTIONS.map((name) => {
    const own = of(name), lines = data.runs.flatMap((run) => run.stragglers);
    const parts = [own.length ? drawn(own) : null];
    if (name === "Tasks" && own.length) parts.unshift(tasks());
    if (name === "Stragglers" && lines.length) parts.push(table(["time", "which process, and why"], lines));
    else if (name === "Stragglers" && own.length) parts.push(make("p", {}, "No process was named as slow."));
    return parts.some(Boolean) ? section(name, parts) : null;
  });
  const others = of("");
  document.getElementById("main").replaceChildren(...[
    make("header", {}, make("h1", {}, names.join(" · ")), make("span", { class: "faint" }, `maxstack report, ${new Date(1000 * data.made).toLocaleString()}`),
      make("span", { id: "live", role: "status", class: "faint" }, data.every ? problem || "live" : ""), controls()),
    overview(), ...remarks, markKey(), ...sections,
    others.length ? closed(`Other figures (${others.length})`, () => drawn(others)) : null,
    each("Where the time went", time),
    each("Checkpoints", (run) => run.checkpoints.length ? long(table(["step", "size", "eval loss", "saved", "where"], run.checkpoints), "checkpoints") : null),
    each("Samples", samples),
    ...data.tables.map(([title, headings, rows]) => section(title, table(headings, rows))),
    several ? section("What differs between the configurations", data.differences.length ? table(["key", ...names], data.differences) : make("p", {}, "Nothing.")) : null,
    data.versions.length ? section("Versions", table(["", ...names], data.versions, ([, first, ...rest]) => (rest.some((cell) => cell !== first) ? "differs" : ""))) : null,
    each("Log, without progress", (run) => run.log.length ? long(table(["time", ""], run.log), "log") : null),
  ].filter(Boolean));
  if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
}

async function follow() {
  const before = problem;
  try {
    const text = await (await fetch("data", { cache: "no-store" })).text();
    const next = JSON.parse(text);
    problem = "";
    if (JSON.stringify({ ...next, made: 0 }) !== JSON.stringify({ ...data, made: 0 })) { data = next; render(); return; }
  } catch {
    problem = "not connected; this is how it was";
  }
  if (problem !== before) document.getElementById("live").textContent = problem || "live";
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", render);
addEventListener("beforeprint", () => {
  document.documentElement.classList.add("paper");
  document.querySelectorAll("details").forEach((details) => opened.add(details.id.slice(8)));
  render();
});
addEventListener("afterprint", () => { document.documentElement.classList.remove("paper"); opened.clear(); render(); });
render();
if (data.every) setInterval(follow, 1000 * data.every);
