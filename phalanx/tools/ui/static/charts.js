// Curves of the chosen runs: one chart per name, all with one x axis.
"use strict";

const BUCKETS = 700;
const EXACT = 3000;
const HEIGHT = 220;
const ORDER = ["train/loss", "val/loss", "val/accuracy", "train/grad_norm", "train/learning_rate", "train/epoch_loss"];
const charts = new Map();
let hovered = null;

const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const settings = name => state.charts[name] || {};
const isRate = name => /learning_rate$/.test(name);
const SPREAD = 10;  // between the peaks of learning rates: from there on their axis is logarithmic
const smoothing = name => settings(name).smooth ?? state.smooth;

function names(system) {
  const found = new Set(chosen().flatMap(run => [...(cache.curves.get(run.id)?.value?.keys() || [])]));
  const rank = name => ORDER.includes(name) ? ORDER.indexOf(name) : name.startsWith("perf/") ? 200 : 100;
  return [...found].filter(name => name.startsWith("system/") === system)
    .sort((a, b) => rank(a) - rank(b) || (a < b ? -1 : 1));
}

/** Return the x values of a curve on the chosen axis. */
function places(id, curve) {
  if (state.x === "step") return curve.step;
  const began = state.x === "time" ? beganAt(id) : 0;
  return began ? curve.time.map(time => time - began) : curve.time;
}

/** Average with what came before, by a weight from 0 to 1; the start is not drawn to zero. */
function smoothed(values, before) {
  const found = new Float64Array(values.length);
  let sum = 0, weight = 0;
  for (let i = 0; i < values.length; i++) {
    if (!Number.isNaN(values[i])) {
      sum = before * sum + (1 - before) * values[i];
      weight = before * weight + 1 - before;
    }
    found[i] = Number.isNaN(values[i]) ? NaN : sum / weight;
  }
  return found;
}

/** Put lines on one x axis: with their own x values where these are few, else in buckets, lowest and highest. */
function aligned(lines, log) {
  const all = lines.some(line => line.merged) ? null
    : [...new Set(lines.flatMap(line => [...line.x]))].sort((a, b) => a - b);
  const keep = value => !Number.isNaN(value) && (!log || value > 0);
  if (all && all.length <= EXACT) {
    const at = new Map(all.map((x, i) => [x, i]));
    return [all, ...lines.map(line => {
      const column = new Array(all.length).fill(null);
      line.x.forEach((x, i) => { if (keep(line.low[i])) column[at.get(x)] = line.low[i]; });
      return column;
    })];
  }
  let low = Infinity, high = -Infinity;
  for (const { x } of lines) if (x.length) { low = Math.min(low, x[0]); high = Math.max(high, x[x.length - 1]); }
  if (state.range) [low, high] = [Math.max(low, state.range[0] - 0.1 * (state.range[1] - state.range[0])),
    Math.min(high, state.range[1] + 0.1 * (state.range[1] - state.range[0]))];
  const width = (high - low) / BUCKETS || 1;
  const xs = Array.from({ length: 2 * BUCKETS }, (_, i) => low + (i / 2 + 0.25) * width);
  return [xs, ...lines.map(line => {
    const column = new Array(2 * BUCKETS).fill(null);
    for (let i = 0; i < line.x.length; i++) {
      const at = 2 * Math.min(BUCKETS - 1, Math.floor((line.x[i] - low) / width));
      if (at < 0 || line.x[i] > high) continue;
      if (keep(line.low[i]) && (column[at] === null || line.low[i] < column[at])) column[at] = line.low[i];
      if (keep(line.high[i]) && (column[at + 1] === null ||
        line.high[i] > column[at + 1])) column[at + 1] = line.high[i];
    }
    return column;
  })];
}

function linesOf(name) {
  const faint = [], lines = [], before = smoothing(name);
  for (const run of chosen()) {
    const curve = cache.curves.get(run.id)?.value?.get(name);
    if (!curve) continue;
    const x = places(run.id, curve);
    const twice = before > 0 || curve.merged;  // all values faintly, and their mean
    (twice ? faint : lines).push({ run, x, low: curve.low, high: curve.high, merged: curve.merged, faint: twice });
    if (twice) {
      const mean = smoothed(curve.mean, before);
      lines.push({ run, x, low: mean, high: mean, merged: curve.merged, faint: false });
    }
  }
  return [...faint, ...lines];
}

/** Whether a chart has a logarithmic axis: as was chosen, else for learning rates of different size. */
function isLog(name) {
  if (settings(name).log !== undefined || !isRate(name)) return Boolean(settings(name).log);
  const peaks = chosen().map(run => cache.curves.get(run.id)?.value?.get(name)).filter(Boolean)
    .map(curve => curve.high.reduce((most, value) => value > most ? value : most, 0)).filter(peak => peak > 0);
  return peaks.length > 1 && Math.max(...peaks) >= SPREAD * Math.min(...peaks);
}

/** Return the lowest and highest value that a chart's axis shows, where a run would flatten the others; else null.
 *
 * The usual run is the median one, by what 96% of its values lie between. What is more than ten times its span away
 * is outside. A chart with a logarithmic axis, or with "all values", shows everything.
 */
function limits(lines) {
  const spans = lines.filter(line => !line.faint).map(line => {
    const known = Float64Array.from(line.low).filter(Number.isFinite).sort();
    return known.length ? [known[Math.floor(0.02 * (known.length - 1))], known[Math.ceil(0.98 * (known.length - 1))],
      known[0], known[known.length - 1]] : null;
  }).filter(Boolean);
  if (!spans.length) return null;
  const middle = (values, up) => values.sort((a, b) => a - b)[Math[up ? "ceil" : "floor"]((values.length - 1) / 2)];
  const high = middle(spans.map(span => span[1]), false), low = middle(spans.map(span => span[0]), true);
  const room = 10 * Math.max(high - low, 0.5 * Math.abs(high), 0.5 * Math.abs(low));
  const bottom = Math.min(low, high) - room, top = Math.max(low, high) + room;
  const isOut = span => span[2] < bottom || span[3] > top;
  const usual = spans.filter(span => !isOut(span)), count = spans.length - usual.length;
  if (!room || !count) return null;
  return usual.length ? { count, bottom: Math.min(...usual.map(span => span[2])),
    top: Math.max(...usual.map(span => span[3])) } : { count, bottom: low, top: high };
}

function options(name, lines, width, limit) {
  const log = isLog(name);
  const axis = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 },
    ticks: { stroke: css("--line"), width: 1 }, font: "11px system-ui, sans-serif" };
  const alpha = Math.round(64 / Math.max(1, lines.length / 6)).toString(16).padStart(2, "0");
  const onX = { step: number, time: duration }[state.x];
  const range = (u, low, high) => low === null ? [0, 1]
    : uPlot.rangeNum(limit ? Math.max(low, limit.bottom) : low, limit ? Math.min(high, limit.top) : high, 0.06, true);
  return {
    width, height: HEIGHT, legend: { show: false }, padding: [8, 14, 0, 0], focus: { alpha: 0.15 },
    scales: { x: { time: state.x === "clock", range: (u, low, high) => state.range ||
      (low === null ? [0, 1] : [low, high > low ? high : low + 1]) }, y: log ? { distr: 3 } : { range } },
    axes: [{ ...axis, size: 32, ...(onX ? { values: (u, values) => values.map(onX) } : {}) },
           { ...axis, size: 62, ...(log ? { grid: { ...axis.grid, filter: powers }, ticks: { ...axis.ticks, filter: powers } }
             : {}), values: (u, values) => values.map(value => value === null ? ""
             : valueOf(name, value, true)) }],
    cursor: { y: false, sync: { key: "x" }, drag: { x: true, y: false, setScale: false },
      points: { size: 7, width: 1.5, stroke: css("--card"), fill: (u, series) => u.series[series].stroke(u, series) },
      dataIdx: (u, series, hovered, x) => series === 0 ? hovered : lines[series - 1].faint ? null
        : pointAt(u, u.data[series], hovered, x),
      bind: { dblclick: () => () => zoom(null) } },
    series: [{}, ...lines.map(line => {
      const { colour, dash } = look(line.run.id);
      return { stroke: line.faint ? colour + alpha : colour, width: line.faint || lines.length > 8 ? 1.1 : 1.8,
        dash: line.faint ? [] : dash, spanGaps: true, points: { show: line.x.length === 1 } };
    })],
    hooks: {
      setSelect: [u => { if (u === hovered && u.select.width > 3) zoom([u.posToVal(u.select.left, "x"),
        u.posToVal(u.select.left + u.select.width, "x")]); }],
      setCursor: [u => { if (u === hovered) showTip(u, name, lines); }],
      ready: [u => { u.over.addEventListener("mouseenter", () => { hovered = u; });
        u.over.addEventListener("mouseleave", () => { hovered = null; tip.hidden = true; }); }],
    },
  };
}

/** Keep the powers of ten: there is no room for a line at each value of a logarithmic axis. */
const powers = (u, values) => values.map(value => Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-9
  ? value : null);

const tip = document.getElementById("tip");
const MOST_ROWS = 10;
const REACH = 6;  // pixels by which the cursor may be beside the first or last point of a line
function showTip(u, name, lines) {
  const { left, top, idx, idxs } = u.cursor;
  const rows = left < 0 || idx === null || idx === undefined ? [] : lines.map((line, i) => ({ run: line.run, at: idxs[i + 1],
    value: line.faint || idxs[i + 1] === null ? null : u.data[i + 1][idxs[i + 1]] }))
    .filter(row => row.value !== null && row.value !== undefined);
  if (!rows.length) { tip.hidden = true; return; }
  const far = row => Math.abs(u.valToPos(row.value, "y") - top);
  const near = rows.sort((a, b) => far(a) - far(b)).slice(0, MOST_ROWS).sort((a, b) => b.value - a.value);
  const x = u.data[0][idx], text = { step: each => number(Math.round(each)), time: duration, clock }[state.x];
  tip.replaceChildren(h("b", {}, state.x === "step" ? `step ${text(x)}` : text(x)),
    ...near.map(row => h("div", {}, swatch(row.run.id), `${valueOf(name, row.value)}  ${shortName(row.run.id)}`,
      text(u.data[0][row.at]) === text(x) ? null : h("span", { className: "soft" }, `  at ${text(u.data[0][row.at])}`))),
    rows.length > near.length ? h("div", { className: "soft" }, `and ${rows.length - near.length} more`) : "");
  placeBeside(tip, u.root.closest("figure").getBoundingClientRect(), u.over.getBoundingClientRect(), left, top);
}

/** Return the place of a line's point that is nearest to an x; null before its first and after its last one. */
function pointAt(u, column, hovered, x) {
  let before = hovered, after = hovered;
  while (before >= 0 && (column[before] === null || column[before] === undefined)) before--;
  while (after < column.length && (column[after] === null || column[after] === undefined)) after++;
  const xs = u.data[0], away = place => Math.abs(u.valToPos(xs[place], "x") - u.valToPos(x, "x"));
  if (before < 0 || after >= column.length) {
    const end = before < 0 ? after : before;
    return end >= 0 && end < column.length && away(end) <= REACH ? end : null;
  }
  return away(before) <= away(after) ? before : after;
}

/** Place a box where it covers neither the chart nor its legend: right, left, above or below; else away from the cursor. */
function placeBeside(box, figure, plot, left, top) {
  box.hidden = false;
  const [width, height] = [box.offsetWidth, box.offsetHeight], gap = 6;
  const level = Math.max(gap, Math.min(plot.top + top - height / 2, window.innerHeight - height - gap));
  const along = Math.max(gap, Math.min(plot.left + left - width / 2, window.innerWidth - width - gap));
  const [x, y] = figure.right + gap + width < window.innerWidth ? [figure.right + gap, level]
    : figure.left - gap - width > 0 ? [figure.left - gap - width, level]
    : figure.top - gap - height > 0 ? [along, figure.top - gap - height]
    : figure.bottom + gap + height < window.innerHeight ? [along, figure.bottom + gap]
    : [left > plot.width / 2 ? plot.left + gap : plot.right - width - gap, plot.top + gap];
  box.style.left = `${x}px`;
  box.style.top = `${y}px`;
}

function place(box, bounds, left, top) {
  box.hidden = false;
  const x = bounds.left + left, flip = x + box.offsetWidth + 24 > window.innerWidth;
  box.style.left = `${Math.max(4, flip ? x - box.offsetWidth - 12 : x + 14)}px`;
  box.style.top = `${Math.min(bounds.top + top + 12, window.innerHeight - box.offsetHeight - 4)}px`;
}

function zoom(range) {
  state.range = range;
  for (const { plot } of charts.values()) plot?.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  changed();
}

/** Write under a chart which run is which and where each stands, and what is wrong with its values. */
function legend(name, chart) {
  const runs = chosen().map(run => ({ run, curve: cache.curves.get(run.id)?.value?.get(name) })).filter(each =>
    each.curve);
  const last = curve => { for (let i = curve.mean.length - 1; i >= 0;
    i--) if (!Number.isNaN(curve.mean[i])) return curve.mean[i]; return null; };
  const focus = id => chart.plot.setSeries(id === null ? null
    : 1 + chart.lines.findIndex(line => !line.faint && line.run.id === id), { focus: true });
  const rows = runs.map(({ run, curve }) => h("li", { title: run.id, onmouseenter: () => focus(run.id),
    onmouseleave: () => focus(null) }, swatch(run.id), state.page === "run" ? h("span", { className: "who" }, "last")
    : h("a", { className: "who", href: addressOf("run", { run: run.id }) }, shortName(run.id)),
    h("b", { className: "last" }, valueOf(name, last(curve)))));
  const bad = runs.filter(({ curve }) => curve.notFinite).map(({ run, curve }) => h("p", { className: "bad" },
    `${run.id}: ${curve.notFinite === 1 ? "1 value is" : `${curve.notFinite} values are`}`
      + ` not finite, the first at step ${number(curve.first)}`));
  const cut = chart.limit ? [h("p", { className: "soft" }, chart.limit.count === 1 ? "1 run leaves the axis. "
    : `${chart.limit.count} runs leave the axis. `, h("button", { type: "button", className: "link",
      onclick: () => set(name, { all: true }) }, "Show all values"))] : [];
  return [h("ul", { className: runs.length > 6 ? "many" : runs.length === 1 ? "one" : "" }, rows), ...cut, ...bad];
}

/** Change the settings of one chart. */
function set(name, values) {
  state.charts[name] = { ...settings(name), ...values };
  changed();
}

function menu(name) {
  const box = (key, text) => h("label", {}, h("input", { type: "checkbox", checked: Boolean(settings(name)[key]),
    onchange: event => set(name, { [key]: event.target.checked }) }), text);
  return h("details", { className: "menu" }, h("summary", { ariaLabel: `settings of ${name}`, title: "settings" }, "⋯"),
    h("div", {}, h("label", {}, h("input", { type: "checkbox", checked: isLog(name),
        onchange: event => set(name, { log: event.target.checked }) }), "log scale"), box("all", "all values, outliers too"),
      h("label", {}, "smoothing", h("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: smoothing(name),
        oninput: event => set(name, { smooth: Number(event.target.value) }) })),
      h("button", { type: "button", onclick: () => saveTable(name) }, "Save as CSV"),
      h("button", { type: "button", onclick: () => set(name, { hidden: true }) }, "Hide this chart")));
}

/** Return the points of a chart as CSV: of a long run those that the page has. */
function tableOfChart(name) {
  const quoted = text => `"${text.replaceAll('"', '""')}"`;
  const rows = chosen().flatMap(run => {
    const curve = cache.curves.get(run.id)?.value?.get(name);
    return curve ? Array.from(curve.step, (step, i) => `${quoted(run.id)},${step},${curve.time[i]},${curve.mean[i]}`) : [];
  });
  return [`run,step,time,${quoted(name)}`, ...rows, ""].join("\n");
}

function saveTable(name) {
  const address = URL.createObjectURL(new Blob([tableOfChart(name)], { type: "text/csv" }));
  h("a", { href: address, download: `${name.replaceAll("/", "-")}.csv` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);  // the download has begun by then
}

/** Draw the charts of these names into the grid, and remove others; return whether there is one. */
function drawCharts(wanted) {
  const grid = at("charts");
  for (const [name, chart] of charts) if (!wanted.includes(name)) { chart.plot?.destroy(); chart.figure.remove();
    charts.delete(name); }
  wanted.forEach((name, place) => {
    let chart = charts.get(name);
    if (!chart) {
      const plot = h("div", { className: "plot" }), notes = h("div", { className: "notes" });
      const title = h("figcaption", {}, h("span", {}, name),
        h("small", {}, { GB: "", s: "", "%": "" }[unitOf(name)] ?? unitOf(name)), menu(name));
      chart = { figure: h("figure", { ariaLabel: name }, title, plot, notes), box: plot, notes };
      charts.set(name, chart);
    }
    if (grid.children[place] !== chart.figure) grid.insertBefore(chart.figure, grid.children[place] || null);
  });
  for (const name of wanted) drawChart(name, charts.get(name));
  return wanted.length > 0;
}

function drawChart(name, chart) {
  const log = isLog(name), lines = linesOf(name), data = aligned(lines, log);
  chart.limit = log || settings(name).all || isRate(name) ? null : limits(lines);
  const key = JSON.stringify([lines.map(line => [line.run.id, line.faint, line.x.length === 1, look(line.run.id)]),
    log, chart.limit, state.x, dark.matches]);
  if (chart.plot && chart.key === key) {
    chart.lines.splice(0, chart.lines.length, ...lines);
    chart.plot.setData(data);
  } else {
    chart.plot?.destroy();
    chart.plot = new uPlot(options(name, lines, chart.box.clientWidth || 400, chart.limit), data, chart.box);
    chart.key = key;
    chart.lines = lines;
  }
  keepFocus(chart.notes, () => chart.notes.replaceChildren(...legend(name, chart)));
}

function dropCharts() {
  for (const chart of charts.values()) { chart.plot?.destroy(); chart.figure.remove(); }
  charts.clear();
  tip.hidden = true;
}

const dark = matchMedia("(prefers-color-scheme: dark)");
new ResizeObserver(() => {
  for (const { plot, box } of charts.values()) if (plot && box.clientWidth &&
    plot.width !== box.clientWidth) plot.setSize({ width: box.clientWidth, height: HEIGHT });
}).observe(at("charts"));
