// Numbers, times and names as people read them, with their units.
"use strict";

function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return value.toLocaleString("en");
  for (const [unit, many] of [[" T", 1e12], [" G", 1e9], [" M", 1e6]]) {
    if (size >= many) return size < 1e15 ? Number((value / many).toPrecision(3)) + unit : value.toExponential(1);
  }
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return size >= 0.001 || size === 0 ? String(Number(value.toPrecision(4))) : value.toExponential(2);
}

function bytes(count) {
  if (typeof count !== "number") return "–";
  for (const unit of ["bytes", "kB", "MB", "GB"]) {
    if (count < 1000) return `${count < 10 && unit !== "bytes" ? count.toFixed(1) : Math.round(count)} ${unit}`;
    count /= 1000;
  }
  return `${count.toFixed(1)} TB`;
}

/** Return a length of time: 12 ms, 3.4 s, 4:05 (minutes) or 1:04:05 (hours). */
function duration(seconds) {
  if (typeof seconds !== "number") return "–";
  if (seconds && Math.abs(seconds) < 1) return `${Number((1000 * seconds).toPrecision(3))} ms`;
  if (seconds < 60) return `${Number(seconds.toPrecision(3))} s`;
  const [hours, minutes, rest] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, Math.floor(seconds) % 60];
  const two = value => String(value).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(rest)} h` : `${minutes}:${two(rest)} min`;
}

const share = value => `${Number((100 * value).toPrecision(3))}%`;
const clock = seconds => new Date(seconds * 1000).toLocaleString("sv").slice(0, 19);

/** Return a moment in few signs: the time of today, else the day. */
function when(seconds) {
  if (!seconds) return "–";
  const text = clock(seconds), today = clock(Date.now() / 1000).slice(0, 10);
  return text.startsWith(today) ? `today ${text.slice(11, 16)}` : text.slice(0, 16);
}

const UNITS = [
  [/(samples_per_second|throughput)$/, "samples/s"], [/tokens_per_second$/, "tokens/s"], [/seconds$/, "s"],
  [/(bytes|memory|memory_limit)$/, "GB"], [/(power|power_watts)$/, "W"], [/temperature$/, "°C"],
  [/(utilization|data_wait|communication|mfu|accuracy|top\d+)$/, "%"], [/speedup$/, "x"], [/cpu_cores$/, "cores"],
];
const unitOf = name => UNITS.find(([pattern]) => pattern.test(name))?.[1] || "";

/** Return a value of a curve or gauge with its unit; `bare`: without it where the reader sees it beside. */
function valueOf(name, value, bare = false) {
  const unit = unitOf(name);
  if (typeof value !== "number") return value === null || value === undefined ? "–" : String(value);
  if (unit === "GB") return bytes(value);
  if (unit === "s") return duration(value);
  if (unit === "%") return Math.abs(value) <= 2 ? share(value) : number(value);
  return unit && !bare ? `${number(value)} ${unit}` : number(value);
}

/** Whether less or more of a metric is better, as its name says: -1, 1, or 0 where it does not. */
function better(name) {
  if (/(loss|error|perplexity|seconds)$/.test(name)) return -1;
  return /(accuracy|f1|auc|top\d+|per_second|throughput|mfu|exact_match|bleu|rouge)$/.test(name) ? 1 : 0;
}

const GAUGES = {
  own_seconds: "own work per step", step_seconds: "time per step", samples_per_second: "speed of the rank",
  data_wait: "waiting for data", communication: "waiting for other ranks", memory: "memory at its peak",
  memory_limit: "memory it may use", gpu_utilization: "GPU utilisation", gpu_memory: "GPU memory",
  gpu_power: "GPU power", gpu_temperature: "GPU temperature", data_wait_seconds: "waited for data so far",
  communication_seconds: "waited for other ranks so far", cpu_cores: "busy CPU cores",
};
const gaugeName = name => GAUGES[name] || name.replaceAll("_", " ");

/** Return the last part of a trial's name, or the whole of another one's. */
const shortName = id => id.includes("/trials/") ? `${id.split("/")[0]} #${Number(id.split("/").pop())}` : id;
