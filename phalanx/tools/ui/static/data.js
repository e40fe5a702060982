// What the page knows: runs, their curves and details, from the server or from the file itself.
"use strict";

const embedded = document.getElementById("data");
const stored = embedded && JSON.parse(embedded.textContent);

const state = {
  runs: new Map(), selected: new Set(), page: "runs", run: "", study: "", tab: "",
  sort: "-started", group: "", filter: "", columns: null, trials: false, cursor: "", column: "", setting: "",
  x: "step", smooth: 0, range: null, charts: {}, all: false, changed: false, gauge: "", kinds: "main", log: "",
};
let defaults = {};  // of settings: a run tells only what differs from them
const cache = { curves: new Map(), detail: new Map(), study: new Map() };
const at = id => document.getElementById(id);

/** Return an element; children are nodes or text, never markup: names of runs may hold any character. */
function h(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (name === "style") Object.assign(element.style, value);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter(child => child !== null && child !== undefined && child !== false));
  return element;
}

const PATHS = { runs: "api/runs", defaults: "api/defaults", detail: "api/run/", curves: "api/curves/", study: "api/study/", log: "api/log/" };

async function ask(kind, id, query) {
  if (stored) return id === undefined ? stored[kind] : stored[kind][id];
  return bodyOf(await fetch(PATHS[kind] + (id === undefined ? "" : encodeURIComponent(id)) + (query
    ? "?" + new URLSearchParams(query) : "")));
}

async function bodyOf(answer) {
  const body = answer.headers.get("content-type")?.includes("json") ? await answer.json()
    : { error: await answer.text() };
  if (!answer.ok) throw new Error(body.error);
  return body;
}

/** Name or tag a run, write its note or remove it; the answer comes as a change of the list. */
async function change(id, what) {
  await bodyOf(await fetch("api/change/" + encodeURIComponent(id), { method: "POST", body: JSON.stringify(what),
    headers: { "Content-Type": "application/json" } }));
}

function decoded(text, Kind) {
  const bytes = Uint8Array.fromBase64 ? Uint8Array.fromBase64(text) : Uint8Array.from(atob(text), c => c.charCodeAt(0));
  return new Kind(bytes.buffer, 0, bytes.byteLength / Kind.BYTES_PER_ELEMENT);
}

/** Return a run's curves by name: {step, time, low, high, mean}; the last three are equal where nothing was merged. */
function unpacked(tables) {
  const found = new Map();
  for (const table of tables) {
    const step = decoded(table.step, Float64Array), time = decoded(table.time, Float64Array);
    for (const [name, curve] of Object.entries(table.curves)) {
      const low = decoded(curve.low, Float32Array);
      found.set(name, {
        step, time, low, merged: Boolean(curve.high), notFinite: curve.not_finite, first: curve.first,
        high: curve.high ? decoded(curve.high, Float32Array) : low, mean: curve.mean ? decoded(curve.mean, Float32Array)
          : low,
      });
    }
  }
  return found;
}

const whole = [];  // long files that are shown by a preview, and read one after the other
let reading = false;

/** Load what is missing or has changed of a run or search, then call `then`; one request of a kind at a time. */
function need(kind, id, then) {
  const run = state.runs.get(id);
  if (kind !== "study" && (!run || run.status === "unreadable")) return;
  const zoomed = kind === "curves" && state.range && state.x !== "clock" && !stored;
  const entry = cache[kind].get(id) || {};
  const query = kind !== "curves" ? undefined : zoomed ? zoomQuery(run) : entry.value ? { width: 600 }
    : { width: 600, preview: 300 };
  const version = kind === "study" ? trialsOf(id).map(each => each.version).join() : run.version;
  const key = version + JSON.stringify(query && { ...query, preview: 0 });
  if (entry.key === key || entry.loading) return;
  cache[kind].set(id, entry);
  entry.loading = true;
  ask(kind, id, query)
    .then(body => {
      entry.value = kind === "curves" ? unpacked(body) : body;
      entry.error = "";
      if (kind === "curves" && body.some(table => table.preview)) {
        entry.preview = true;
        whole.push([id, entry, then]);
      }
    })
    .catch(error => { entry.error = `${id}: ${error.message}`; })
    .finally(() => { entry.loading = false; entry.key = key; then(); need(kind, id, then); readWhole(); });
}

/** Replace previews by what the server reads meanwhile: one at a time, when nothing else is being loaded. */
function readWhole() {
  if (reading || !whole.length || [...cache.curves.values()].some(entry => entry.loading)) return;
  const [id, entry, then] = whole.shift();
  reading = true;
  ask("curves", id, { width: 600 })
    .then(body => { entry.value = unpacked(body); entry.preview = false; })
    .catch(error => { entry.error = `${id}: ${error.message}`; })
    .finally(() => { reading = false; then(); readWhole(); });
}

function zoomQuery(run) {
  const began = state.x === "time" ? beganAt(run.id) : 0;
  const margin = (state.range[1] - state.range[0]) / 2;
  return { width: 600, by: state.x, from: state.range[0] - margin + began, to: state.range[1] + margin + began };
}

/** Return when a run began, in seconds: the time of its first point or event. */
function beganAt(id) {
  const entry = cache.curves.get(id);
  if (!entry) return 0;
  if (entry.began === undefined && entry.value) {
    entry.began = Math.min(...[...entry.value.values()].map(curve => curve.time.length ? curve.time[0] : Infinity));
  }
  return entry.began || 0;
}

/** Return the runs that the page is about: the open one, or those that are ticked. */
function chosen() {
  const one = state.page === "run" ? state.runs.get(state.run) : null;
  return one ? [one] : state.page === "run" ? [] : [...state.runs.values()].filter(run => state.selected.has(run.id));
}
const details = () => chosen().map(run => cache.detail.get(run.id)?.value).filter(Boolean);
const trialsOf = study => [...state.runs.values()].filter(run => run.study === study);
const studies = () => [...new Set([...state.runs.values()].map(run => run.study).filter(Boolean))].sort().reverse();

const COLOURS = ["#3a6fd8", "#e8590c", "#2b8a3e", "#c2255c", "#7048e8", "#0c8599", "#c99a06", "#868e96", "#e377c2",
  "#5fa8ff"];
const DASHES = [[], [8, 4], [2, 3], [12, 3, 2, 3]];
const DASH_NAMES = ["solid", "dashed", "dotted", "dash and dot"];
const slots = new Map();

/** Return colour and dashes of a run. A run keeps them: its name chooses the colour, or the next one that is free. */
function look(id) {
  if (!slots.has(id)) {
    const used = new Set([...slots].filter(([other]) => state.selected.has(other)).map(([, slot]) => slot));
    let wish = 0;
    for (const letter of id) wish = (31 * wish + letter.codePointAt(0)) % 9973;
    let slot = wish % 10;
    for (let round = 0; used.has(slot) && round < 40; round++) {
      slot = Math.floor(round / 10) * 10 + (wish + round) % 10;
    }
    slots.set(id, slot);
  }
  const slot = slots.get(id);
  return { colour: COLOURS[slot % 10], kind: Math.floor(slot / 10) % 4, dash: DASHES[Math.floor(slot / 10) % 4] };
}

/** Return a short line in a run's colour and dashes. */
function swatch(id) {
  const { colour, kind } = look(id);
  return h("i", { className: `swatch kind${kind}`, style: { color: colour }, ariaHidden: "true" });
}
