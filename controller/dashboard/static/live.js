// One event stream per page. It polls nothing: every message says which panels to fetch again, and a
// `tick` carries its figures along. A hidden page lets go of its connection (a browser has six per
// host) and takes it up where it stopped.
"use strict";

const body = document.body;
const badge = document.getElementById("badge");
const DEBOUNCE_MS = 200;
const RETRY_MS = 3000;

let after = body.dataset.after;
let greeted = false;
let source = null;
let lastHeard = Date.now();
let offlineSince = null;
const due = new Map();

function connect() {
  if (source || document.hidden) return;
  const query = new URLSearchParams({ after });
  if (body.dataset.job) query.set("job", body.dataset.job);
  source = new EventSource(`/api/v1/stream?${query}`);
  for (const kind of ["hello", "event", "job", "tick", "nodes", "reset"]) {
    source.addEventListener(kind, (message) => hear(kind, message));
  }
  source.onerror = () => {
    offlineSince ??= new Date();
    if (source.readyState === EventSource.CLOSED) {  // refused: the browser does not try again
      disconnect();
      setTimeout(connect, RETRY_MS);
    }
    showBadge();
  };
}

function disconnect() {
  source?.close();
  source = null;
}

function hear(kind, message) {
  lastHeard = Date.now();
  offlineSince = null;
  showBadge();
  const said = message.data ? JSON.parse(message.data) : null;
  if (message.lastEventId) after = message.lastEventId;
  if (kind === "hello") {
    if (greeted) tell("reset", null);  // we were away: ask for all anew
    greeted = true;
    return;
  }
  if (kind === "tick") tick(said);
  tell(kind, said);
}

function tell(kind, said) {
  document.dispatchEvent(new CustomEvent(`varuna:${kind}`, { detail: said }));
  refresh(kind);
}

function refresh(kind) {
  for (const panel of document.querySelectorAll(`[data-on~="${kind}"]`)) {
    if (!due.has(panel)) {
      due.set(panel, setTimeout(() => { due.delete(panel); htmx.trigger(panel, "refresh"); }, DEBOUNCE_MS));
    }
  }
}

function tick(said) {
  if (said.job !== body.dataset.job) return;
  const show = (name, text) => {
    const at = document.querySelector(`[data-tick="${name}"]`);
    if (at) at.textContent = text;
  };
  show("step", said.step.toLocaleString("en"));
  if (said.loss !== null) show("loss", said.loss.toFixed(4));
  if (said.examples_per_second !== null) show("rate", said.examples_per_second.toFixed(1));
  const bar = document.querySelector('[data-tick="progress"]');
  if (bar) bar.value = said.step;
}

// ---- what is shown of the connection, and times that grow old

function showBadge() {
  if (!badge) return;
  badge.hidden = false;
  const age = Math.round((Date.now() - lastHeard) / 1000);
  let [kind, text] = ["live", "● Live"];
  if (offlineSince && age > 30) {
    [kind, text] = ["offline", `✕ Offline since ${offlineSince.toLocaleTimeString()}`];
  } else if (offlineSince) {
    [kind, text] = ["stale", `▲ Stale: last update ${age} s ago, reconnecting`];
  }
  if (badge.textContent !== text) badge.textContent = text;
  badge.className = `badge ${kind}`;
  body.classList.toggle("stale-page", kind !== "live");
}

function age(seconds) {  // as controller/words.py writes it
  const parts = [];
  let left = Math.max(0, Math.floor(seconds));
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["m", 60], ["s", 1]]) {
    const amount = Math.floor(left / size);
    left %= size;
    if (amount || parts.length) parts.push([amount, unit]);
  }
  return parts.slice(0, 2).filter(([n]) => n).map(([n, u]) => `${n}${u}`).join(" ") || "0s";
}

function growOld() {
  for (const time of document.querySelectorAll("time[datetime]")) {
    const text = `${age((Date.now() - Date.parse(time.dateTime)) / 1000)} ago`;
    if (time.textContent !== text) time.textContent = text;
  }
  if (offlineSince) showBadge();
}

// ---- buttons: copy a command, try a failed panel again

document.addEventListener("click", async (click) => {
  const button = click.target.closest("button");
  if (button?.dataset.copy) {
    await navigator.clipboard.writeText(button.dataset.copy);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  } else if (button && "retry" in button.dataset) {
    htmx.trigger(button.closest("[hx-get]"), "refresh");
  }
});

document.addEventListener("varuna:job", ({ detail: job }) => {
  if (job.id !== body.dataset.job) return;
  const glyph = document.querySelector(".head .pill span")?.textContent ?? "";
  document.title = `${glyph} ${job.name} ${job.state} · Varuna`;
});

if ("live" in body.dataset) {
  document.addEventListener("visibilitychange", () => (document.hidden ? disconnect() : connect()));
  window.addEventListener("pagehide", disconnect);
  connect();
}
setInterval(growOld, 1000);
