// Views of runs one below the other: ranks, time, events, settings, checkpoints.
"use strict";

const TIME_COLOURS = {
  "productive": "#1e9e54", "start-up: import": "#8ab4f8", "start-up: model and data": "#5b8def",
    "start-up: first steps": "#3b6fd4", "data wait": "#e8a33d",
  "exposed communication": "#d9772f", "evaluation": "#8250df", "checkpoint stall": "#0d99a8",
    "lost and redone": "#d6336c", "recovery": "#b4234f", "recovery: abort of collectives": "#8c1b3e",
    "recovery: new process groups": "#e07a9b", "idle": "#9aa0a6",
};
const PHASE_COLOURS = { evaluate: "#8250df", checkpoint: "#0d99a8", compile: "#3b6fd4" };
const MARKS = { failure: "✕", rank_lost: "▼", recovered: "▲", rank_suspected: "?", checkpoint: "◆", run_ended: "■" };
const SEVERE = ["failure", "rank_lost", "rank_suspected"];

const heading = (id, more) => h("h3", {}, state.page === "run" ? null : [swatch(id),
  h("a", { href: addressOf("run", { run: id }) }, shortName(id))], more ? h("small", {}, more) : null);
const runCell = id => h("td", { className: "short" }, swatch(id), h("a", { href: addressOf("run", { run: id }) },
  shortName(id)));
const ofMany = () => state.page !== "run";
const empty = text => h("p", { className: "empty" }, text);

/** Return a table; without titles it has no head. `stacks`: on a phone each row is a block of titles and values. */
function tableOf(titles, rows, stacks = false) {
  const cellOf = (cell, place) => {
    const found = cell instanceof HTMLTableCellElement ? cell : h("td", {}, cell ?? "");
    const title = titles?.[place];
    if (stacks && title) found.setAttribute("data-title", title.textContent ?? title);
    return found;
  };
  return h("div", { className: "scroll", tabIndex: 0 }, h("table", { className: stacks ? "stacks" : "" },
    titles ? h("thead", {}, h("tr", {}, titles.map(title => title instanceof HTMLTableCellElement
      ? title : h("th", { scope: "col" }, title)))) : null,
    h("tbody", {}, rows.map(cells => h("tr", {}, cells.map(cellOf))))));
}

const short = text => h("td", { className: "short" }, text);

// Ranks ---------------------------------------------------------------------------------------------------------------

const LABELLED = 14;  // pixels: in lower rows only the first and the last have a label
const BELOW = [58, 111, 216], ABOVE = [214, 72, 22], CALM = 0.1;
/** Return the colour of a value's distance from the run's median; up to 10% it is the same for all. */
function ramp(distance) {
  const far = Math.min(1, Math.max(0, Math.abs(distance) - CALM) / (distance < 0 ? 0.5 - CALM : 1 - CALM));
  const rest = dark.matches ? [58, 66, 76] : [222, 228, 233];
  return `rgb(${rest.map((value, i) => Math.round(value + far * ((distance < 0 ? BELOW : ABOVE)[i] - value))).join()})`;
}

function viewRanks() {
  const found = details().filter(detail => detail.heat);
  if (!found.length) return [empty("No rank has reported yet: ranks report about themselves every 10 seconds.")];
  const gauges = [...new Set(found.flatMap(detail => Object.keys(detail.heat.gauges)))];
  if (!gauges.includes(state.gauge)) state.gauge = gauges.includes("own_seconds") ? "own_seconds" : gauges[0];
  const choice = h("select", { id: "gauge", onchange: event => { state.gauge = event.target.value; changed(); } },
    gauges.map(name => h("option", { value: name, selected: name === state.gauge }, gaugeName(name))));
  const colours = [-0.5, -0.3, -0.1, 0.1, 0.4, 0.7, 1].map(ramp).join();
  return [h("div", { className: "tools" }, h("label", {}, "show ", choice),
    h("span", { className: "scale soft" }, "−50%", h("i", { className: "ramp",
      style: { background: `linear-gradient(90deg, ${colours})` } }), "+100% of the run's median"),
    h("span", { className: "soft" }, "Framed: a rank that the others wait for")), ...found.map(heatMap)];
}

function heatMap(detail) {
  const { ranks, times, steps, slowest, counted, gauges } = detail.heat;
  const matrix = gauges[state.gauge] ? decoded(gauges[state.gauge], Float32Array) : new Float32Array(0);
  const known = matrix.filter(Number.isFinite).sort();
  if (!known.length) return h("div", { className: "card" }, heading(detail.id), empty(`no values: ${gaugeName(state.gauge)}`));
  const low = known[0], high = known[known.length - 1], middle = known[Math.floor(known.length / 2)];
  const row = Math.max(2, Math.min(22, Math.floor(420 / ranks.length))),
    column = Math.max(2, Math.ceil(900 / times.length));
  const canvas = h("canvas", { width: column * times.length, height: row * ranks.length, className: "heat", role: "img",
    style: { height: `${row * ranks.length}px` },
    ariaLabel: `${gaugeName(state.gauge)} of ${ranks.length} ranks over ${times.length} reports, `
      + `from ${valueOf(state.gauge, low)} to ${valueOf(state.gauge, high)}` });
  const pen = canvas.getContext("2d");
  ranks.forEach((rank, r) => times.forEach((_, t) => {
    const value = matrix[r * times.length + t];
    if (!Number.isFinite(value)) return;
    pen.fillStyle = ramp(middle ? value / middle - 1 : 0);
    pen.fillRect(t * column, r * row, column - (column > 9), row - (row > 9));
  }));
  pen.strokeStyle = css("--text");
  ranks.forEach((rank, r) => {  // one frame around reports that follow each other
    for (let from = 0, to; from < times.length; from = to) {
      for (to = from + 1; to < times.length && (slowest[to] === rank) === (slowest[from] === rank);) to++;
      if (slowest[from] === rank) pen.strokeRect(from * column + 0.5, r * row + 0.5, (to - from) * column - 1, row - 1);
    }
  });
  canvas.addEventListener("mousemove", event => {
    const t = Math.floor(event.offsetX / canvas.clientWidth * times.length),
      r = Math.floor(event.offsetY / canvas.clientHeight * ranks.length);
    const value = matrix[r * times.length + t];
    tip.replaceChildren(h("b", {}, `rank ${ranks[r]}, step ${number(steps[t])}`),
      h("div", {}, `${gaugeName(state.gauge)} ${Number.isFinite(value) ? valueOf(state.gauge, value) : "not known"}`),
      h("div", { className: "soft" }, clock(times[t])),
      slowest[t] === ranks[r] ? h("div", { className: "bad" }, "the others wait for this rank") : "");
    place(tip, canvas.getBoundingClientRect(), event.offsetX, event.offsetY);
  });
  canvas.addEventListener("mouseleave", () => { tip.hidden = true; });
  const of = counted > ranks.length ? `${ranks.length} of ${counted} ranks, the slowest`
    : ranks.length === 1 ? "1 rank" : `${ranks.length} ranks`;
  return h("div", { className: "card" }, heading(detail.id, `${of}; median ${valueOf(state.gauge, middle)}, `
    + `from ${valueOf(state.gauge, low)} to ${valueOf(state.gauge, high)}`),
    h("div", { className: "heatbox" },
      h("div", { className: "ranks soft" }, ranks.map((rank, r) => h("span", {}, row >= LABELLED || r === 0
        || r === ranks.length - 1 ? `rank ${rank}` : ""))), canvas),
    h("div", { className: "ends soft" }, h("span", {}, `step ${number(steps[0])}`),
      h("span", {}, `step ${number(steps[steps.length - 1])}`)));
}

// Time ----------------------------------------------------------------------------------------------------------------

function viewTime() {
  const found = details();
  if (!found.length) return [];
  const used = new Set(found.flatMap(({ goodput }) => Object.keys(goodput || {}).filter(name => goodput[name] > 0)));
  const legend = h("div", { className: "legend" }, Object.keys(TIME_COLOURS).filter(name => used.has(name)).map(name =>
    h("span", {}, h("i", { className: "swatch", style: { background: TIME_COLOURS[name] } }), name)));
  return [h("h2", {}, "Where the time went"), legend, h("div", { className: "card" }, found.map(goodput)),
    h("h2", {}, "Timeline"), ...found.map(timeline)];
}

function goodput(detail) {
  if (!detail.goodput) return h("div", { className: "goodput" }, heading(detail.id),
    h("p", { className: "soft" }, "Its events do not say where its time went."));
  const parts = Object.entries(detail.goodput), total = parts.reduce((sum, [, seconds]) => sum + seconds, 0) || 1;
  const part = seconds => `${(100 * seconds / total).toFixed(1)}%`;
  if (total < LONG_ENOUGH && chosen().every(run => run.status !== "running")) return h("div", { className: "goodput" },
    heading(detail.id), h("p", { className: "soft" }, `It took ${duration(total)}: too short to say where time goes.`));
  const tries = detail.attempts > 1 ? `, ${detail.attempts} attempts` : "";
  const again = detail.redone ? `, ${number(detail.redone)} step${detail.redone === 1 ? "" : "s"} done again` : "";
  const words = parts.filter(([, seconds]) => seconds / total >= 0.005).sort((a, b) => b[1] - a[1])
    .map(([name, seconds]) => `${name} ${part(seconds)}`).join(" · ");
  return h("div", { className: "goodput" }, heading(detail.id, `${duration(total)} of wall time, with start-up${tries}${again}`),
    h("div", { className: "bar", role: "img", ariaLabel: words },
      parts.filter(([, seconds]) => seconds > 0).map(([name, seconds]) =>
      h("span", { style: { width: `${100 * seconds / total}%`, background: TIME_COLOURS[name] || "#999" },
        title: `${name}: ${duration(seconds)}, ${part(seconds)}` },
        seconds / total > 0.08 ? part(seconds) : ""))),
    h("p", { className: "soft" }, words));
}

function timeline(detail) {
  const laned = detail.spans.map(span => span[0]);
  const marked = detail.events.filter(event => Object.hasOwn(MARKS, event.event) && !laned.includes(event.event));
  if (!detail.starts.length && !marked.length) return h("div", { className: "card" }, heading(detail.id),
    h("p", { className: "soft" }, "It has written no events."));
  const begin = Math.min(...detail.starts, ...detail.spans.map(span => span[1]), ...marked.map(event => event.time),
    detail.until);
  const end = Math.max(detail.until, ...detail.spans.map(span => span[2]), begin + 1e-3);
  const at = time => `${100 * (time - begin) / (end - begin)}%`;
  const span = (name, from, to, background) => h("i", {
    className: "span", title: `${name}: ${duration(to - from)} from ${duration(from - begin)}`,
    style: { background, left: at(from), width: `max(2px, ${100 * (to - from) / (end - begin)}%)` } });
  const lane = (name, inside) => h("div", { className: "lane" }, h("span", { className: "soft" }, name),
    h("div", { className: "track" }, inside));
  const stops = detail.events.filter(event => event.event === "run_ended").map(event => event.time);
  const runs = detail.starts.map((from, i) => span("training", from,
    Math.min(stops.find(time => time >= from) ?? end, detail.starts[i + 1] ?? end), "#1e9e5499"));
  const phases = [...new Set(laned)].map(name =>
    lane(name, detail.spans.filter(each => each[0] === name).map(each =>
      span(name, each[1], each[2], PHASE_COLOURS[name] || "#6b7280"))));
  const events = marked.map(event => h("b", {
    className: SEVERE.includes(event.event) ? "mark bad" : "mark",
    title: `${duration(event.time - begin)}: ${event.event} ${textOf(event)}`,
    style: { left: `clamp(7px, ${at(event.time)}, calc(100% - 7px))` } }, MARKS[event.event]));
  return h("div", { className: "card" }, heading(detail.id, `from ${clock(begin)}`), lane("training", runs), phases,
    lane("events", events),
    h("div", { className: "ends soft inset" }, h("span", {}, "0"), h("span", {}, duration(end - begin))),
    h("p", { className: "soft legend" },
      Object.entries(MARKS).filter(([kind]) => marked.some(event => event.event === kind)).map(([kind, mark]) =>
      h("span", {}, `${mark} ${kind.replace("_", " ")}`))));
}

// Events --------------------------------------------------------------------------------------------------------------

const WORDS = {
  message: event => `${event.level}: ${event.text}`,
  failure: event => `${placeOf(event)}: ${event.error}: ${event.message}`,
  rank_lost: event => `rank ${event.lost} ${event.how}; ${event.action}, ${event.size} ranks (${event.why})`,
  sample: event => event.text,
  recovered: event => `after step ${number(event.step)}: ${event.world_size} ranks go on after ${duration(event.seconds)} `
    + `(${event.reason})`,
  rank_suspected: event => `${event.what}: ${event.why}; ${event.action}`,
  checkpoint: event =>
    `${event.best ? "best, " : ""}${bytes(event.bytes)} in ${duration(event.seconds)}: ${event.path}`,
  run_started: event => [`${event.world_size} x ${event.device}`, event.layout || event.strategy, event.precision,
    `${number(event.parameters)} parameters`, event.resumed_from ? `resumed from ${event.resumed_from}` : ""]
    .filter(Boolean).join(", "),
  run_ended: event => `${event.status}${event.reason ? `: ${event.reason}` : ""}; ${number(event.step)} steps in `
    + `${duration(event.total_time)}, ${number(event.throughput)} samples/s`,
};

/** Return where something happened, of what is known: rank, host, step. */
const placeOf = event => [`rank ${event.rank ?? 0}${event.host ? ` on ${event.host}` : ""}`,
  typeof event.step === "number" ? `step ${number(event.step)}` : ""].filter(Boolean).join(", ");

/** Return an event in words; of a kind that this page does not know, its fields. */
function textOf(event) {
  if (Object.hasOwn(WORDS, event.event)) return WORDS[event.event](event);
  const isEmpty = value => value === null || value === "" || (typeof value === "object" && !Object.keys(value).length);
  return Object.entries(event)
    .filter(([name, value]) => !["event", "time", "rank", "step"].includes(name) && !isEmpty(value))
    .map(([name, value]) => `${name.replaceAll("_", " ")} ${shownValue(value)}`).join(", ");
}

const shownValue = value => typeof value === "object" && value ? JSON.stringify(value) : number(value);

function viewEvents() {
  const found = details();
  const rows = found.flatMap(detail => detail.events.map(event => ({ id: detail.id, event }))).sort((a, b) =>
    b.event.time - a.event.time);
  const kinds = [...new Set(rows.map(row => row.event.event))].sort();
  const groups = { main: "all but checkpoints and samples", all: "all", ...Object.fromEntries(kinds.map(kind =>
    [kind, kind.replaceAll("_", " ")])) };
  const choice = h("select", { id: "kind", onchange: event => { state.kinds = event.target.value; changed(); } },
    Object.entries(groups).map(([kind, text]) => h("option", { value: kind, selected: kind === state.kinds }, text)));
  const matches = rows.filter(({ event }) => state.kinds === "all" || (kinds.includes(state.kinds)
    ? event.event === state.kinds : !["checkpoint", "sample"].includes(event.event)));
  const shown = matches.slice(0, 500);
  return [...found.filter(detail => detail.failures.length).map(failures),
    h("div", { className: "tools" }, h("label", {}, "events ", choice),
      h("span", { className: "soft" }, `${shown.length} of ${rows.length}`)),
    tableOf(["time", ...(ofMany() ? ["run"] : []), "event", "step", ""],
      shown.map(({ id, event }) => [short(clock(event.time)), ...(ofMany() ? [runCell(id)] : []),
        h("td", { className: SEVERE.includes(event.event) || event.level === "error" ? "bad nowrap" : "nowrap" },
          event.event.replaceAll("_", " ")), number(event.step), h("td", { className: "wide" }, textOf(event))]))];
}

/** Show the first failure of a run; those of other ranks are mostly its consequences. */
function failures(detail) {
  const [first, ...rest] = detail.failures;
  const words = rest.length === 1 ? "1 other rank stopped" : `${rest.length} other ranks stopped`;
  return h("div", { className: "card failed" }, failureParts(detail, first), rest.length
    ? h("details", {}, h("summary", {}, words), rest.map(failure => failureParts(detail, failure))) : null);
}

function failureParts(detail, failure) {
  const lines = Array.isArray(failure.traceback) ? failure.traceback.join("\n") : String(failure.traceback || "");
  const log = `logs/rank-${failure.rank}.log`;
  return h("div", {}, heading(detail.id, `${placeOf(failure)}, ${clock(failure.time)}`),
    h("p", { className: "bad" }, `${failure.type}: ${failure.message}`), failure.hint ? h("p", {}, failure.hint) : null,
    lines ? h("details", { open: true }, h("summary", {}, "traceback"),
      h("pre", { className: "end", tabIndex: 0 }, lines)) : null,
    detail.files[log] && !stored ? h("p", {}, h("a", { href: addressOf("run", { run: detail.id, tab: "logs", log }) },
      `Log of rank ${failure.rank}`)) : null,
    failure.output ? h("details", {}, h("summary", {}, `last output of rank ${failure.rank}`),
      h("pre", { className: "end", tabIndex: 0 }, failure.output)) : null);
}

// Settings and checkpoints --------------------------------------------------------------------------------------------

function viewConfig() {
  const found = details();
  const names = [...new Set(found.flatMap(detail => Object.keys(detail.facts)))];
  const known = found.filter(detail => detail.configured);  // a script's run may have no settings to compare
  const same = name => known.every(detail =>
    JSON.stringify(detail.facts[name]) === JSON.stringify(known[0].facts[name]));
  const marked = new Set(found.flatMap(detail => detail.changed || []));
  const shown = names.filter(name => (found.length > 1 ? state.all || !same(name) : !state.changed || marked.has(name))
    && name.toLowerCase().includes(state.setting.toLowerCase()));
  const box = (key, text) => h("label", {}, h("input", { type: "checkbox", id: `only-${key}`, checked: state[key],
    onchange: event => { state[key] = event.target.checked; changed(); } }), text);
  const search = h("input", { type: "search", id: "setting", placeholder: "Find a name", ariaLabel: "Find a name",
    value: state.setting, oninput: event => { state.setting = event.target.value; changed(); } });
  const commands = found.map(detail => h("div", {}, heading(detail.id, detail.path), copied(detail.command)));
  const cell = (name, value) => ["total_time", "throughput"].includes(name) ? valueOf(name === "total_time" ? "seconds"
    : name, value) : shownValue(value);
  const isMarked = (detail, name) => found.length > 1 ? state.all && !same(name) : detail.changed.includes(name);
  const title = detail => ofMany() ? h("span", {}, swatch(detail.id), shortName(detail.id)) : "value";
  const table = tableOf(["", ...found.map(title)], shown.map(name => [h("th", { scope: "row" }, name),
    ...found.map(detail => h("td", { className: isMarked(detail, name) ? "differs" : "" },
      cell(name, detail.facts[name])))]));
  table.classList.add("config");
  return [h("div", { className: "tools" }, search, found.length > 1 ? [box("all", " also what is equal"),
    h("span", { className: "soft" }, `${names.filter(name => !same(name)).length} of ${names.length} differ`)]
    : marked.size ? [box("changed", " only what differs from the defaults"),
      h("span", { className: "soft" }, `${marked.size} of ${names.length}, marked`)] : null),
  table, shown.length ? "" : empty("No name fits."),
  ofMany() ? h("h2", {}, "Commands") : "", ofMany() ? h("div", { className: "card" }, commands) : ""];
}

function viewSamples() {
  const found = details().flatMap(detail => detail.events.filter(event => event.event === "sample")
    .map(event => h("div", { className: "card" }, heading(detail.id, `step ${number(event.step)}`),
      h("pre", { className: "end", tabIndex: 0 }, event.text))));
  return found.length ? found.reverse()
    : [empty("No samples: the recipes gpt, llama and moe write a text at their end.")];
}

function viewCheckpoints() {
  const all = details().flatMap(detail => detail.checkpoints.map(each => ({ id: detail.id, each })));
  const kept = all.filter(({ each }) => each.exists), gone = all.length - kept.length;
  const rows = (state.all ? all : kept).map(({ id, each }) => [...(ofMany() ? [runCell(id)] : []), number(each.step),
    short(clock(each.time)), short(bytes(each.bytes)), short(duration(each.seconds)),
    short(each.stall ? duration(each.stall) : "–"),
    h("td", { className: each.best ? "good" : "" }, each.best ? "best" : each.exists ? "" : "removed"),
    h("td", { className: each.exists ? "path" : "path soft" }, each.path)]);
  const box = gone ? h("div", { className: "tools" }, h("label", {}, h("input", { type: "checkbox", checked: state.all,
    id: "gone", onchange: event => { state.all = event.target.checked; changed(); } }),
  ` also ${number(gone)} that were removed`)) : "";
  return all.length ? [box, tableOf([...(ofMany() ? ["run"] : []), "step", "saved", "size", "took", "training waited", "",
    "path"], rows, true)] : [empty("No checkpoint has been saved.")];
}
