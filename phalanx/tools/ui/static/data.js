// What the page knows: runs, their curves and details, from the server or from the file itself.
"use strict";

const embedded = document.getElementById("data");
const stored = embedded && JSON.parse(embedded.textContent);

const state = {
  runs: new Map(), selected: new Set(), tab: "curves", x: "step", log: false, smooth: 0, range: null,
  filter: "", all: false, gauge: "", kind: "",
};
const cache = { curves: new Map(), detail: new Map() };

/** Return an element; children are nodes or text, never markup: names of runs may hold any character. */
function h(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (name === "style") Object.assign(element.style, value);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.flat().filter(child => child !== null && child !== undefined));
  return element;
}

async function ask(kind, id, query) {
  if (stored) return kind === "runs" ? stored.runs : stored[kind][id];
  const path = { runs: "api/runs", detail: "api/run/", curves: "api/curves/" }[kind];
  const answer = await fetch(path + (id === undefined ? "" : encodeURIComponent(id)) + (query
    ? "?" + new URLSearchParams(query) : ""));
  const body = answer.headers.get("content-type")?.includes("json") ? await answer.json()
    : { error: await answer.text() };
  if (!answer.ok) throw new Error(body.error);
  return body;
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

/** Load what is missing or has changed of a run, then call `then`; one request of a kind at a time. */
function need(kind, id, then) {
  const run = state.runs.get(id);
  if (!run || run.status === "unreadable") return;
  const zoomed = kind === "curves" && state.range && state.x !== "clock" && !stored;
  const query = kind !== "curves" ? undefined : zoomed ? zoomQuery(run) : { width: 600 };
  const key = run.version + JSON.stringify(query);
  const entry = cache[kind].get(id) || {};
  if (entry.key === key || entry.loading) return;
  cache[kind].set(id, entry);
  entry.loading = true;
  ask(kind, id, query)
    .then(body => { entry.value = kind === "curves" ? unpacked(body) : body; entry.error = ""; })
    .catch(error => { entry.error = `${id}: ${error.message}`; })
    .finally(() => { entry.loading = false; entry.key = key; then(); need(kind, id, then); });
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

const chosen = () => [...state.runs.values()].filter(run => state.selected.has(run.id));
const details = () => chosen().map(run => cache.detail.get(run.id)?.value).filter(Boolean);

const COLOURS = ["#3b7ddd", "#e8710a", "#1e9e54", "#d6336c", "#8250df", "#0d99a8", "#b7791f", "#6b7280", "#c2410c",
  "#4d7c0f",
  "#7aa7f0", "#f2a65a", "#6cc494", "#ec87ab", "#b18ff0", "#5fc3cf", "#d9b25f", "#a3a9b3", "#e08a68", "#93b85a"];
/** Return colour and dashes of a run: by its age, so that a new run does not change those of the others. */
function look(id) {
  const place = state.runs.size - 1 - [...state.runs.keys()].indexOf(id);
  return { colour: COLOURS[place % 20], dash: [[], [8, 4], [2, 3], [12, 3, 2, 3]][Math.floor(place / 20) % 4] };
}

function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return value.toLocaleString("en");
  for (const [unit, many] of [[" T", 1e12], [" G", 1e9], [" M", 1e6]]) {
    if (size >= many) return size < 1e15 ? Number((value / many).toPrecision(4)) + unit : value.toExponential(2);
  }
  return size >= 0.001 || size === 0 ? String(Number(value.toPrecision(4))) : value.toExponential(2);
}

function bytes(count) {
  if (typeof count !== "number") return "–";
  for (const unit of ["bytes", "kB", "MB", "GB"]) {
    if (count < 999.5) return `${count < 10 && unit !== "bytes" ? count.toFixed(1) : Math.round(count)} ${unit}`;
    count /= 1000;
  }
  return `${count.toFixed(1)} TB`;
}

function duration(seconds) {
  if (typeof seconds !== "number") return "–";
  if (seconds < 60) return `${Number(seconds.toPrecision(3))} s`;
  const [hours, minutes, rest] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, Math.floor(seconds) % 60];
  const two = value => String(value).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

const clock = seconds => new Date(seconds * 1000).toLocaleString("sv").slice(0, 19);
const isBytes = name => /bytes$|memory/.test(name);
const isShare = name => /(utilization|data_wait|communication|mfu|accuracy)$/.test(name);
function valueOf(name, value) {
  if (isBytes(name)) return bytes(value);
  return isShare(name) && Math.abs(value) <= 2 ? `${Number((100 * value).toPrecision(3))}%` : number(value);
}
