// The two charts of a job: capacity and plan over time, and loss by step. Their points come from
// the REST API; a `tick` appends, an `event` fetches again.
"use strict";

const job = document.body.dataset.job;
const REFETCH_MS = 1000;
const charts = {};
let data = null;
let fetching = null;

async function get(what) {
  const answer = await fetch(`/api/v1/jobs/${encodeURIComponent(job)}/${what}`);
  if (!answer.ok) throw new Error(`${what}: ${answer.status} ${answer.statusText}`);
  return answer.json();
}

async function load() {
  fetching = null;
  try {
    const [series, generations, recoveries, checkpoints] = await Promise.all([
      get("series?points=1000"), get("generations"), get("recoveries"), get("checkpoints")]);
    data = { series, generations: generations.items, recoveries: recoveries.items,
             checkpoints: checkpoints.items };
    draw();
  } catch (error) {
    for (const place of document.querySelectorAll(".plot")) {
      if (!place.firstChild) say(place, `The chart could not be loaded (${error.message}).`);
    }
  }
}

function loadSoon() { fetching ??= setTimeout(load, REFETCH_MS); }

function say(place, text) {
  const line = document.createElement("p");
  line.className = "empty";
  line.textContent = text;
  place.replaceChildren(line);
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const seconds = (text) => Date.parse(text) / 1000;
const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");

// ---- capacity and plan over time

function capacityTable() {
  const points = data.series.capacity;
  const at = points.map((p) => seconds(p.at));
  const live = points.map((p) => p.live);
  const used = points.map((p) => p.used);
  if (at.length) {  // the last value holds until now
    at.push(Math.max(Date.now() / 1000, at.at(-1) + 1));
    live.push(live.at(-1));
    used.push(used.at(-1));
  }
  return [at, live, used];
}

function bands(plot) {
  const { ctx, bbox } = plot;
  const x = (at) => plot.valToPos(Math.min(Math.max(at, plot.scales.x.min), plot.scales.x.max), "x", true);
  const now = Date.now() / 1000;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  data.generations.filter((g) => g.first_step_at && g.shape).forEach((g, i) => {
    const [from, to] = [x(seconds(g.first_step_at)), x(g.ended_at ? seconds(g.ended_at) : now)];
    ctx.fillStyle = colour(i % 2 ? "band-b" : "band-a");
    ctx.fillRect(from, bbox.top, to - from, bbox.height);
    label(ctx, `${g.shape.depth}×${g.shape.replicas}`, from, to, bbox.top);
  });
  for (const r of data.recoveries) {
    hatch(ctx, x(seconds(r.began_at)), x(r.ended_at ? seconds(r.ended_at) : now), bbox);
  }
  ctx.fillStyle = colour("faint");
  for (const c of data.checkpoints.filter((c) => c.completed_at)) {
    ctx.fillRect(x(seconds(c.completed_at)), bbox.top + bbox.height - 5 * devicePixelRatio,
                 devicePixelRatio, 5 * devicePixelRatio);
  }
  ctx.restore();
}

function label(ctx, text, from, to, top) {
  ctx.font = `600 ${12 * devicePixelRatio}px system-ui, sans-serif`;
  ctx.fillStyle = colour("faint");
  ctx.textAlign = "left";
  ctx.textBaseline = "top";
  if (ctx.measureText(text).width + 10 * devicePixelRatio < to - from) {
    ctx.fillText(text, from + 5 * devicePixelRatio, top + 4 * devicePixelRatio);
  }
}

function hatch(ctx, from, to, bbox) {
  const gap = 6 * devicePixelRatio;
  const width = Math.max(to - from, 2 * devicePixelRatio);
  ctx.save();
  ctx.beginPath();
  ctx.rect(from, bbox.top, width, bbox.height);
  ctx.clip();
  ctx.strokeStyle = colour("hatch");
  ctx.lineWidth = 1.5 * devicePixelRatio;
  ctx.beginPath();
  for (let at = from - bbox.height; at < from + width; at += gap) {
    ctx.moveTo(at, bbox.top + bbox.height);
    ctx.lineTo(at + bbox.height, bbox.top);
  }
  ctx.stroke();
  ctx.restore();
}

function capacityOptions() {
  const stepped = uPlot.paths.stepped({ align: 1 });
  return {
    scales: { y: { range: () => [0, 1 + Math.max(1, ...data.series.capacity.map((p) => p.live))] } },
    hooks: { drawClear: [bands] },
    series: [
      { label: "time", value: (_, at) => (at === null ? "" : clock(at)) },
      { label: "connected", stroke: colour("live"), width: 1.5, dash: [4, 3], paths: stepped, points: { show: false } },
      { label: "used", stroke: colour("used"), width: 2, paths: stepped, points: { show: false },
        fill: colour("band-a") },
    ],
    axes: [axis({ values: (_, ticks) => ticks.map(clock), space: 90, size: 28 }),
           axis({ size: 34, incrs: [1, 2, 5, 10, 25, 50, 100] })],
  };
}

// ---- loss by step

function lossTable() {
  const kept = new Map();
  const lost = new Map();
  for (const p of data.series.points) (p.superseded ? lost : kept).set(p.step, p.loss);
  const heldOut = new Map();
  for (const p of data.series.evaluations) if (!p.superseded) heldOut.set(p.step, p.loss);
  const steps = [...new Set([...kept.keys(), ...lost.keys(), ...heldOut.keys()])].sort((a, b) => a - b);
  const column = (values) => steps.map((step) => (values.has(step) ? values.get(step) : null));
  return [steps, column(kept), column(lost), column(heldOut)];
}

function replayed() {
  const kept = new Map();
  for (const p of data.series.points) if (!p.superseded && p.loss !== null) kept.set(p.step, p.loss);
  const differences = data.series.points
    .filter((p) => p.superseded && p.loss !== null && kept.has(p.step))
    .map((p) => Math.abs(p.loss - kept.get(p.step)));
  const place = document.getElementById("replayed");
  if (!differences.length) { place.textContent = ""; return; }
  const most = Math.max(...differences);
  place.textContent = `${differences.length} replayed step${differences.length > 1 ? "s" : ""}: ` +
    `max difference ${most === 0 ? "0" : most.toExponential(1)}`;
}

function lossOptions() {
  return {
    scales: { x: { time: false } },
    series: [
      { label: "step" },
      { label: "loss", stroke: colour("kept"), width: 2, points: { show: false }, value: (_, v) => v?.toFixed(5) ?? "–" },
      { label: "lost attempt", stroke: colour("lost"), width: 1.5, dash: [3, 3], points: { show: true, size: 4 },
        spanGaps: false, value: (_, v) => v?.toFixed(5) ?? "–" },
      { label: "held-out", show: data.series.evaluations.length > 0, stroke: colour("live"), width: 1.5,
        points: { show: true, size: 5 }, spanGaps: true, value: (_, v) => v?.toFixed(5) ?? "–" },
    ],
    axes: [axis({ size: 28 }), axis({ size: 52 })],
  };
}

// ---- both

function axis(more) {
  const line = { stroke: colour("line"), width: 1 };
  return { stroke: colour("faint"), font: "12px system-ui, sans-serif", grid: line, ticks: { show: false }, ...more };
}

const KINDS = {
  capacity: { height: 225, table: capacityTable, options: capacityOptions, head: ["Time", "Connected", "Used"],
              cell: (v, column) => (column ? v : clock(v)) },
  loss: { height: 205, table: lossTable, options: lossOptions, head: ["Step", "Loss", "Lost attempt", "Held-out"],
          cell: (v, column) => (v === null ? "–" : column ? v.toFixed(5) : v) },
};

function draw() {
  for (const [name, kind] of Object.entries(KINDS)) {
    const place = document.getElementById(name);
    const table = kind.table();
    if (!table[0].length) { say(place, place.dataset.empty); continue; }
    if (place.dataset.as === "table") { drawTable(place, kind, table); continue; }
    if (charts[name]) {
      charts[name].setData(table);
      if (name === "loss") charts[name].setSeries(3, { show: data.series.evaluations.length > 0 });
      continue;
    }
    place.replaceChildren();
    charts[name] = new uPlot({ width: place.clientWidth, height: kind.height, ...kind.options() }, table, place);
  }
  replayed();
}

function drawAnew() {
  for (const name of Object.keys(KINDS)) forget(name);
  if (data) draw();
}

function forget(name) {
  charts[name]?.destroy();
  delete charts[name];
}

function drawTable(place, kind, table) {
  const made = document.createElement("table");
  const head = made.createTHead().insertRow();
  for (const text of kind.head) head.appendChild(Object.assign(document.createElement("th"), { textContent: text, scope: "col" }));
  const rows = made.createTBody();
  for (let i = Math.max(0, table[0].length - 100); i < table[0].length; i++) {
    const row = rows.insertRow();
    table.forEach((column, c) => { row.insertCell().textContent = kind.cell(column[i], c); });
  }
  const scroll = Object.assign(document.createElement("div"), { className: "scroll", tabIndex: 0 });
  scroll.appendChild(made);
  place.replaceChildren(scroll);
}

document.addEventListener("click", (click) => {
  const button = click.target.closest("[data-table]");
  if (!button || !data) return;
  const place = document.getElementById(button.dataset.table);
  const asTable = place.dataset.as !== "table";
  forget(button.dataset.table);
  place.dataset.as = asTable ? "table" : "chart";
  button.setAttribute("aria-expanded", asTable);
  button.textContent = asTable ? "Chart" : "Table";
  draw();
});

document.addEventListener("varuna:tick", ({ detail: said }) => {
  if (!data || said.job !== job) return;
  if (said.evaluated !== null && !data.series.evaluations.some((p) => p.step === said.evaluated)) loadSoon();
  const last = data.series.points.at(-1);
  if (last && said.step <= last.step) { loadSoon(); return; }  // it went back: a recovery
  data.series.points.push({ step: said.step, loss: said.loss, superseded: false });
  draw();
});
for (const kind of ["event", "nodes", "reset"]) document.addEventListener(`varuna:${kind}`, loadSoon);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAnew);
let width = 0;
new ResizeObserver(([main]) => {
  if (main.contentRect.width !== width) drawAnew();
  width = main.contentRect.width;
}).observe(document.querySelector("main"));
load();
