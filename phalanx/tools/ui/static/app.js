// The list of runs, the tabs, the address, and what changes while runs go on.
"use strict";

const VIEWS = {
  curves: ["Curves", view => drawCharts(view, false) ||
    "No curves yet: a point is written every log_every_n_steps steps."],
  system: ["System", view => drawCharts(view, true) || "No system metrics yet."],
  ranks: ["Ranks", viewRanks], time: ["Time", viewTime], events: ["Events", viewEvents], config: ["Config", viewConfig],
    checkpoints: ["Checkpoints", viewCheckpoints], samples: ["Samples", viewSamples],
};
const at = id => document.getElementById(id);
const isChart = () => state.tab === "curves" || state.tab === "system";
const REST = 300;
let asked = 0, timer = null, drawn = 0;

/** Show the state: load what is missing, and draw what is there; while much arrives, not for each piece of it. */
function changed() {
  writeAddress();
  for (const run of chosen()) need(isChart() ? "curves" : "detail", run.id, arrived);
  soon(0);
}

function arrived() {
  soon(chosen().some(run => cache[isChart() ? "curves" : "detail"].get(run.id)?.loading)
    ? drawn + REST - performance.now() : 0);
}

function soon(milliseconds) {
  clearTimeout(timer);
  timer = setTimeout(() => requestAnimationFrame(() => { draw(); drawn = performance.now(); }),
    Math.max(0, milliseconds));
}

function draw() {
  drawList();
  for (const tab of at("tabs").children) { const on = tab.id === `tab-${state.tab}`; tab.ariaSelected = String(on);
    tab.tabIndex = on ? 0 : -1; }
  at("view").setAttribute("aria-labelledby", `tab-${state.tab}`);
  at("tools").hidden = !isChart();
  at("whole").hidden = !state.range;
  at("x").value = state.x; at("log").checked = state.log; at("smooth").value = state.smooth;
  drawView();
  const entries = chosen().filter(run => run.status !== "unreadable").map(run =>
    cache[isChart() ? "curves" : "detail"].get(run.id));
  const problems = [...entries.map(entry => entry?.error),
    ...entries.flatMap(entry => (entry?.value?.problems || []).map(text => `${entry.value.id}: ${text}`)),
    ...chosen().filter(run => run.status === "unreadable").map(run => `${run.id} cannot be read: ${run.reason}`)];
  at("problems").replaceChildren(...problems.filter(Boolean).map(text => h("p", { className: "bad" }, text)));
  if (entries.every(entry => entry?.value || entry?.error) && asked) {
    const began = asked;
    asked = 0;
    setTimeout(() => { document.body.dataset.drawn = Math.round(performance.now() - began); });
  }
}

function drawView() {
  const view = at("view"), loads = chosen().some(run => cache[isChart() ? "curves" : "detail"].get(run.id)?.loading);
  const message = !state.runs.size ? (stored ? "This file holds no run."
    : "There are no runs in this folder yet. Start one: phalanx train digits")
    : !state.selected.size ? "Choose runs in the list to see them here." : null;
  if (message) { dropCharts(); view.replaceChildren(empty(message)); return; }
  if (!isChart()) { dropCharts(); keepFocus(view, () => view.replaceChildren(...VIEWS[state.tab][1]())); return; }
  const drawn = VIEWS[state.tab][1](view);
  if (drawn !== true) { dropCharts(); view.replaceChildren(empty(loads ? "Loading ..." : drawn)); }
}

/** Change the page without losing the focus, the scroll positions, and which details are open. */
function keepFocus(view, change) {
  const focused = document.activeElement?.id, scrolled = window.scrollY;
  const open = [...view.querySelectorAll("details")].map(each => each.open);
  const shifts = [...view.querySelectorAll(".scroll, pre")].map(each => [each.scrollLeft, each.scrollTop]);
  change();
  view.querySelectorAll("details").forEach((each, i) => { if (i < open.length) each.open = open[i]; });
  view.querySelectorAll(".scroll, pre").forEach((each, i) => {
    if (shifts[i]) [each.scrollLeft, each.scrollTop] = shifts[i];
    else if (each.className === "end") each.scrollTop = each.scrollHeight;
  });
  if (focused) at(focused)?.focus();
  window.scrollTo(window.scrollX, scrolled);
}

function drawList() {
  const words = state.filter.toLowerCase().split(/\s+/);
  const shown = [...state.runs.values()].filter(run => words.every(word =>
    [run.id, run.status, ...(run.tags || [])].join(" ").toLowerCase().includes(word)));
  at("count").textContent = `${state.selected.size} of ${state.runs.size}`;
  const list = at("list"), key = JSON.stringify([shown, [...state.selected], state.runs.size]);
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  keepFocus(list, () => list.replaceChildren(...shown.map(item)));
}

function item(run) {
  const share = run.total_steps ? Math.min(1, run.steps / run.total_steps) : run.status === "finished" ? 1 : 0;
  const steps = run.total_steps ? `${number(run.steps)} of ${number(run.total_steps)} steps`
    : `${number(run.steps)} steps`;
  const value = run.best ? `${run.best.name} ${number(run.best.value)}` : run.loss ? `loss ${number(run.loss)}` : "";
  const tags = (run.tags || []).map(tag => h("span", { className: "tag" }, tag));
  const why = run.status === "finished" ? "" : run.reason;
  return h("li", { className: state.selected.has(run.id) ? "on" : "" }, h("label", {},
    h("input", { type: "checkbox", id: `run ${run.id}`, checked: state.selected.has(run.id),
      onchange: event => choose(run.id, event.target.checked) }),
    h("span", { className: "name" }, swatch(run.id), run.id, tags),
    h("span", { className: `status ${run.status}`, title: run.reason || "" }, run.status),
    h("span", { className: "progress" }, h("i", { className: run.status, style: { width: `${100 * share}%` } })),
    h("span", { className: "facts soft" }, [steps, value, run.layout].filter(Boolean).join(" · ")),
    run.started ? h("span", { className: "facts soft" }, clock(run.started)) : null,
    why ? h("span", { className: "facts why", title: why }, why) : null));
}

function choose(id, on) {
  if (on) state.selected.add(id); else state.selected.delete(id);
  state.range = null;
  asked = performance.now();
  changed();
}

/** Take what the server says of runs: all names, the newest first, and the runs that have changed. */
function take({ changed: some, all }) {
  const known = new Map([...state.runs.values(), ...some].map(run => [run.id, run]));
  const first = !state.runs.size;
  state.runs = new Map(all.filter(id => known.has(id)).map(id => [id, known.get(id)]));
  for (const id of state.selected) if (!state.runs.has(id)) { state.selected.delete(id); cache.curves.delete(id);
    cache.detail.delete(id); }
  if (first && !state.selected.size && !location.hash.includes("runs=")) {
    const running = [...state.runs.values()].filter(run => run.status === "running").slice(0, 8);
    for (const run of running.length ? running : stored ? state.runs.values()
      : [...state.runs.values()].slice(0, 1)) state.selected.add(run.id);
  }
  changed();
}

function writeAddress() {
  const words = new URLSearchParams({ tab: state.tab, runs: [...state.selected].map(encodeURIComponent).join(),
    x: state.x });
  if (state.log) words.set("log", "1");
  if (state.smooth) words.set("smooth", state.smooth);
  const hash = `#${words}`;
  if (location.hash !== hash) try { history.replaceState(null, "", hash);
    } catch { /* a file in a sandbox has no history */ }
}

function readAddress() {
  const words = new URLSearchParams(location.hash.slice(1));
  if (words.get("tab") in VIEWS) state.tab = words.get("tab");
  if (["step", "time", "clock"].includes(words.get("x"))) state.x = words.get("x");
  state.log = words.get("log") === "1";
  state.smooth = Math.max(0, Math.min(0.99, Number(words.get("smooth")) || 0));
  const ids = (words.get("runs") || "").split(",").filter(Boolean).map(decodeURIComponent);
  state.selected = new Set(ids.length === 1 && ids[0] === "*" ? state.runs.keys()
    : ids.filter(id => state.runs.has(id)));
}

function openTab(name) {
  at("view").replaceChildren();
  state.tab = name;
  asked = performance.now();
  changed();
}

at("tabs").append(...Object.entries(VIEWS).map(([name, [title]]) => h("button",
  { type: "button", role: "tab", id: `tab-${name}`, onclick: () => openTab(name) }, title)));
at("tabs").addEventListener("keydown", event => {
  const names = Object.keys(VIEWS), move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!move) return;
  openTab(names[(names.indexOf(state.tab) + move + names.length) % names.length]);
  at(`tab-${state.tab}`).focus();
});
at("filter").addEventListener("input", event => { state.filter = event.target.value; drawList(); });
at("all").addEventListener("click",
  () => { const shown = [...at("list").querySelectorAll("input")].map(box => box.id.slice(4));
  shown.forEach(id => state.selected.add(id)); choose(shown[0], shown.length > 0); });
at("none").addEventListener("click", () => { state.selected.clear(); changed(); });
at("x").addEventListener("change", event => { state.x = event.target.value; state.range = null; changed(); });
at("log").addEventListener("change", event => { state.log = event.target.checked; changed(); });
at("smooth").addEventListener("input", event => { state.smooth = Number(event.target.value); changed(); });
at("whole").addEventListener("click", () => zoom(null));
dark.addEventListener("change", changed);
window.addEventListener("keydown",
  event => { if (event.key === "/" && !event.target.matches("input, select")) { event.preventDefault();
  at("filter").focus(); } });
window.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
if (matchMedia("(max-width: 800px)").matches) at("runs").open = false;

async function start() {
  asked = performance.now();
  const runs = await ask("runs");
  state.runs = new Map(runs.map(run => [run.id, run]));
  readAddress();
  state.runs = new Map();
  take({ changed: runs, all: runs.map(run => run.id) });
  if (stored) { at("link").textContent = "a file: it does not change"; return; }
  connect();
}

let source = null;
/** Follow the server while the page is visible: a browser opens six connections to it at most, for all tabs. */
function connect() {
  source?.close();
  if (stored || document.hidden) return;
  source = new EventSource("api/live");
  source.onopen = () => { at("link").textContent = "live"; at("link").className = "good"; };
  source.onerror = () => { at("link").textContent = "no connection: is phalanx ui still running?";
    at("link").className = "bad"; };
  source.onmessage = event => take(JSON.parse(event.data));
}
document.addEventListener("visibilitychange", connect);
window.addEventListener("pagehide", () => source?.close());
start().catch(error => at("problems").replaceChildren(h("p", { className: "bad" }, error.message)));
