// Pages and tabs, the address, keys, and what changes while runs go on.
"use strict";

const VIEWS = {
  overview: ["Overview", viewOverview], curves: ["Curves"], system: ["System"], ranks: ["Ranks", viewRanks],
  time: ["Time", viewTime], logs: ["Logs", viewLogs], events: ["Events", viewEvents], config: ["Config", viewConfig],
  checkpoints: ["Checkpoints", viewCheckpoints], samples: ["Samples", viewSamples],
};
const PAGES = { runs: "Runs", compare: "Compare", studies: "Searches" };
const REST = 1000;  // milliseconds between two drawings while much arrives
let asked = 0, timer = null, drawn = 0, cost = 0;

const tabs = () => state.page === "run" ? Object.keys(VIEWS) : state.page === "compare" && state.selected.size
  ? Object.keys(VIEWS).filter(name => !["overview", "logs"].includes(name)) : [];
const isChart = () => tabs().length > 0 && ["curves", "system"].includes(state.tab);

/** Return what the shown page needs of which run or search. */
function needs() {
  if (state.page === "studies") return studies().map(name => ["study", name]);
  if (state.page === "study") return [["study", state.study]];
  if (!tabs().length) return [];
  const kinds = state.page === "run" ? ["detail", "curves"] : isChart() ? ["curves"] : ["detail"];
  return chosen().flatMap(run => kinds.map(kind => [kind, run.id]));
}

/** Show the state: load what is missing, and draw what is there; while much arrives, not for each piece of it. */
function changed() {
  if (tabs().length && !tabs().includes(state.tab)) state.tab = tabs()[0];
  writeAddress();
  for (const [kind, id] of needs()) need(kind, id, arrived);
  soon(0);
}

function arrived() {
  soon(needs().some(([kind, id]) => cache[kind].get(id)?.loading) ? drawn + REST + 4 * cost - performance.now() : 0);
}

function soon(milliseconds) {
  clearTimeout(timer);
  timer = setTimeout(() => requestAnimationFrame(() => {
    const began = performance.now();
    draw();
    drawn = performance.now();
    cost = drawn - began;
  }), Math.max(0, milliseconds));
}

function draw() {
  drawNav();
  const run = state.page === "run" ? state.runs.get(state.run) : null;
  keepFocus(at("head"), () => at("head").replaceChildren(...(run ? [...runHead(run), tiles(run)]
    : state.page === "study" ? studyHead() : state.page === "compare" ? compareHead() : [])));
  drawTabs();
  at("table-tools").hidden = state.page !== "runs" || !state.runs.size;
  if (!at("table-tools").hidden) keepFocus(at("choices"), () => at("choices").replaceChildren(...runTools().filter(Boolean)));
  if (document.activeElement !== at("filter")) at("filter").value = state.filter;
  drawChartTools();
  drawView();
  const entries = needs().map(([kind, id]) => cache[kind].get(id)), seen = new Set();
  const problems = [...entries.map(entry => entry?.error),
    ...entries.flatMap(entry => (entry?.value?.problems || []).map(text => `${entry.value.id}: ${text}`)),
    ...chosen().filter(run => tabs().length && run.status === "unreadable").map(run =>
      `${run.id} cannot be read: ${run.reason}`)].filter(text => text && !seen.has(text) && seen.add(text));
  at("problems").replaceChildren(...problems.map(text => h("p", { className: "bad" }, text)));
  picked = false;
  const known = needs().filter(([, id]) => state.runs.get(id)?.status !== "unreadable");
  if (asked && known.every(([kind, id]) => cache[kind].get(id)?.value || cache[kind].get(id)?.error)) {
    const began = asked;
    asked = 0;
    setTimeout(() => { document.body.dataset.drawn = Math.round(performance.now() - began); });
  }
}

function drawNav() {
  const shown = Object.entries(PAGES).filter(([page]) => page !== "studies" || studies().length);
  const here = { run: "runs", study: "studies" }[state.page] || state.page;
  at("nav").replaceChildren(...shown.map(([page, title]) => h("a", { href: addressOf(page),
    ariaCurrent: page === here ? "page" : "false" }, title, page === "compare" && state.selected.size
    ? h("small", {}, ` ${state.selected.size}`) : page === "runs" ? h("small", {}, ` ${[...state.runs.values()].filter(run => !run.study).length}`) : null)));
  document.title = state.page === "run" ? `${shortName(state.run)} · Phalanx` : `${PAGES[here]} · Phalanx`;
}

function drawTabs() {
  const names = tabs(), box = at("tabs");
  if (box.dataset.names !== names.join()) {
    box.dataset.names = names.join();
    box.replaceChildren(...names.map(name => h("button", { type: "button", role: "tab", id: `tab-${name}`,
      onclick: () => openTab(name) }, VIEWS[name][0])));
  }
  for (const tab of box.children) { const on = tab.id === `tab-${state.tab}`; tab.ariaSelected = String(on);
    tab.tabIndex = on ? 0 : -1; }
  at("view").setAttribute("aria-labelledby", names.length ? `tab-${state.tab}` : "nav");
}

function drawChartTools() {
  const used = [...new Set(chosen().map(run => look(run.id).kind))], unseen = wantedCharts().filter(name =>
    settings(name).hidden);
  at("chart-tools").hidden = !isChart() || !chosen().length;
  at("whole").hidden = !state.range;
  at("x").value = state.x; at("smooth").value = state.smooth;
  at("log-all").textContent = wantedCharts().every(isLog) ? "linear scale for all"
    : "log scale for all";
  at("hidden-charts").hidden = !unseen.length;
  at("hidden-charts").textContent = unseen.length === 1 ? "Show 1 hidden chart" : `Show ${unseen.length} hidden charts`;
  const reads = chosen().filter(run => cache.curves.get(run.id)?.preview).length;
  at("dashes").textContent = [reads ? `${reads} long runs are being read: until then a part of their points is shown`
    : "", used.length > 1 ? `Ten colours, then other lines: ${used.sort().map(kind => DASH_NAMES[kind]).join(", ")}` : ""]
    .filter(Boolean).join(". ");
}

const wantedCharts = () => state.tab === "overview" && state.page === "run" ? names(false).filter(name =>
  /^(train|val)\/(loss|accuracy)$/.test(name)).slice(0, 3) : isChart() ? names(state.tab === "system") : [];

function drawView() {
  const body = at("body"), loads = needs().some(([kind, id]) => cache[kind].get(id)?.loading);
  const message = !state.runs.size ? noRuns()
    : state.page === "run" && !state.runs.has(state.run) ? `There is no run ${state.run}.`
    : state.page === "compare" && !state.selected.size ? "Tick runs in the table to compare them here." : null;
  const wanted = message ? [] : wantedCharts();
  const some = drawCharts(wanted.filter(name => !settings(name).hidden));
  const charts = isChart() && !message ? (some || wanted.length ? [] : [empty(loads ? "Loading ..."
    : state.tab === "system" ? "No system metrics yet."
      : "No curves yet: a point is written every log_every_n_steps steps.")]) : null;
  const view = { runs: viewRuns, studies: viewStudies, study: viewStudy }[state.page] || VIEWS[state.tab]?.[1];
  keepFocus(body, () => body.replaceChildren(...(message ? [message instanceof Node ? message : empty(message)]
    : charts || view())));
}

/** Say how to get the first run. */
function noRuns() {
  if (stored) return "This file holds no run.";
  return h("div", { className: "card first" }, h("h2", {}, "No runs yet"),
    h("p", {}, "A run appears here as soon as it starts. A small one, which needs no data and a minute on a laptop:"),
    copied("phalanx train digits"),
    h("p", { className: "soft" }, "Start it in the folder in which phalanx ui runs: both use its folder runs."));
}

let picked = false;
window.addEventListener("change", event => { picked ||= event.target.matches?.("select"); }, true);

/** Change the page without losing the focus, the scroll positions, and which details are open.
 *
 * A part in which the reader chooses from a list stays as it is until something is chosen: its list would close.
 */
function keepFocus(view, change) {
  if (!picked && view.contains(document.activeElement) && document.activeElement.matches("select")) return;
  const focused = view.contains(document.activeElement) ? document.activeElement.id : "", scrolled = window.scrollY;
  const open = [...view.querySelectorAll("details")].map(each => each.open);
  const shifts = [...view.querySelectorAll(".scroll, pre, ul.many")].map(each => [each.scrollLeft, each.scrollTop]);
  change();
  view.querySelectorAll("details").forEach((each, i) => { if (i < open.length) each.open = open[i]; });
  view.querySelectorAll(".scroll, pre, ul.many").forEach((each, i) => {
    if (shifts[i]) [each.scrollLeft, each.scrollTop] = shifts[i];
    else if (each.classList.contains("end")) each.scrollTop = each.scrollHeight;
  });
  if (focused) at(focused)?.focus({ preventScroll: true });
  if (window.scrollY !== scrolled) window.scrollTo(window.scrollX, scrolled);
}

/** Take what the server says of runs: all names, the newest first, and the runs that have changed. */
function take({ changed: some, all }) {
  const same = run => JSON.stringify(run) === JSON.stringify(state.runs.get(run.id));
  if (!asked && all.length === state.runs.size && some.every(same)) return;  // the first message repeats the list
  const known = new Map([...state.runs.values(), ...some].map(run => [run.id, run]));
  state.runs = new Map(all.filter(id => known.has(id)).map(id => [id, known.get(id)]));
  for (const id of state.selected) if (!state.runs.has(id)) { state.selected.delete(id); cache.curves.delete(id);
    cache.detail.delete(id); }
  changed();
}

// The address ---------------------------------------------------------------------------------------------------------

/** Return the address of a page, for a link. */
function addressOf(page, more = {}) {
  const words = new URLSearchParams({ page, ...more });
  if (state.selected.size) words.set("runs", [...state.selected].map(encodeURIComponent).join());
  return `#${words}`;
}

function writeAddress() {
  const more = {};
  for (const [name, usual] of Object.entries({ sort: "-started", group: "", filter: "", x: "step", smooth: 0,
    kinds: "main" })) if (state[name] !== usual) more[name] = state[name];
  if (state.page === "run") more.run = state.run;
  if (state.page === "study") more.study = state.study;
  if (tabs().length) more.tab = state.tab;
  if (state.tab === "logs" && state.log) more.log = state.log;
  if (state.trials) more.trials = "1";
  if (state.columns) more.columns = state.columns.join();
  if (Object.keys(state.charts).length) more.charts = JSON.stringify(state.charts);
  const hash = addressOf(state.page, more);
  if (location.hash !== hash) try { history.replaceState(null, "", hash);
    } catch { /* a file in a sandbox has no history */ }
}

/** Take over what the address says; what it does not name stays, except the view of the page. */
function readAddress() {
  const words = new URLSearchParams(location.hash.slice(1));
  for (const name of ["run", "study", "sort", "group", "filter", "kinds", "log"]) {
    if (words.has(name)) state[name] = words.get(name);
  }
  if (words.has("page")) state.page = words.get("page");
  state.tab = words.get("tab") || (words.has("page") ? "" : state.tab);
  if (!["runs", "run", "compare", "studies", "study"].includes(state.page)) state.page = "runs";
  if (["step", "time", "clock"].includes(words.get("x"))) state.x = words.get("x");
  if (words.has("smooth")) state.smooth = Math.max(0, Math.min(0.99, Number(words.get("smooth")) || 0));
  if (words.has("trials")) state.trials = words.get("trials") === "1";
  if (words.has("columns")) state.columns = words.get("columns").split(",").filter(Boolean);
  try { if (words.has("charts")) state.charts = Object(JSON.parse(words.get("charts"))); } catch { /* not ours */ }
  if (words.has("runs")) {
    const ids = words.get("runs").split(",").filter(Boolean).map(decodeURIComponent);
    state.selected = new Set(ids.length === 1 && ids[0] === "*" ? state.runs.keys()
      : ids.filter(id => state.runs.has(id)));
  }
}

function openTab(name) {
  state.tab = name;
  asked = performance.now();
  changed();
}

window.addEventListener("hashchange", () => {
  readAddress();
  state.range = null;
  asked = performance.now();
  changed();
  window.scrollTo(0, 0);
});

// Controls and keys ---------------------------------------------------------------------------------------------------

at("tabs").addEventListener("keydown", event => {
  const names = tabs(), move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!move) return;
  openTab(names[(names.indexOf(state.tab) + move + names.length) % names.length]);
  at(`tab-${state.tab}`).focus();
});
at("filter").addEventListener("input", event => { state.filter = event.target.value; changed(); });
at("x").addEventListener("change", event => { state.x = event.target.value; state.range = null; changed(); });
at("smooth").addEventListener("input", event => {
  state.smooth = Number(event.target.value);
  for (const each of Object.values(state.charts)) delete each.smooth;
  changed();
});
at("log-all").addEventListener("click", () => {
  const log = !wantedCharts().every(isLog);
  for (const name of wantedCharts()) state.charts[name] = { ...settings(name), log };
  dropCharts();  // their menus say it too
  changed();
});
at("whole").addEventListener("click", () => zoom(null));
at("hidden-charts").addEventListener("click", () => {
  for (const each of Object.values(state.charts)) delete each.hidden;
  changed();
});
at("keys-button").addEventListener("click", () => at("keys").showModal());
dark.addEventListener("change", changed);

/** Move the mark of the table by a number of rows. */
function moveCursor(by) {
  const rows = [...at("body").querySelectorAll("tr[id]")].map(row => row.id.slice(4));
  const place = rows.indexOf(state.cursor);
  state.cursor = rows[Math.max(0, Math.min(rows.length - 1, place < 0 ? 0 : place + by))] || "";
  draw();
  at(`row ${state.cursor}`)?.scrollIntoView({ block: "nearest" });
}

const KEYS = {
  "/": () => { if (state.page !== "runs") location.hash = addressOf("runs"); setTimeout(() => at("filter").focus()); },
  "?": () => at("keys").showModal(),
  c: () => { location.hash = addressOf("compare"); },
  Escape: () => { location.hash = addressOf(state.page === "study" ? "studies" : "runs"); },
};
const TABLE_KEYS = {
  j: () => moveCursor(1), k: () => moveCursor(-1), ArrowDown: () => moveCursor(1), ArrowUp: () => moveCursor(-1),
  Enter: () => { if (state.cursor) location.hash = addressOf("run", { run: state.cursor }); },
  x: () => { if (state.cursor) tick([state.cursor], !state.selected.has(state.cursor)); },
};
window.addEventListener("keydown", event => {
  const menu = event.key === "Escape" && document.querySelector("details.menu[open]");
  if (menu) { menu.open = false; menu.querySelector("summary").focus(); event.preventDefault(); return; }
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const field = event.target.closest?.("input:not([type=checkbox]), textarea, select, pre");
  if (field && (event.key === "Escape" || (event.key === "Enter" && field.id === "filter"))) { field.blur();
    if (event.key === "Enter") moveCursor(0); return; }
  const act = !field && (KEYS[event.key] || (state.page === "runs" && !(event.key === "Enter" &&
    event.target.closest?.("a, button, summary")) && TABLE_KEYS[event.key]));
  if (act) { event.preventDefault(); act(); }
});
window.addEventListener("click", event => {
  for (const menu of document.querySelectorAll("details.menu[open]")) if (!menu.contains(event.target)) menu.open = false;
});
window.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });

async function start() {
  asked = performance.now();
  const [runs, usual] = await Promise.all([ask("runs"), ask("defaults")]);
  defaults = usual;
  state.runs = new Map(runs.map(run => [run.id, run]));
  if (stored) {
    state.page = runs.length === 1 ? "run" : "compare";
    state.run = runs[0]?.id;
    state.selected = new Set(runs.length > 1 ? runs.map(run => run.id) : []);
  }
  readAddress();
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
