// The columns of the table of runs: metrics and settings; and the filter and the order by them.
"use strict";

const MOST_COLUMNS = 5, MOST_SETTINGS = 3;
const FIRST_SETTINGS = ["learning_rate", "batch_size", "optimizer", "weight_decay", "mixed_precision", "strategy"];
const OF_MODEL = /^(model|data)\./;
const FIXED = {
  name: { title: "Name", of: run => run.id.toLowerCase() },
  status: { title: "Status", of: run => run.status },
  started: { title: "Started", of: run => run.started },
  seconds: { title: "Training time", of: run => run.seconds },
  steps: { title: "Steps", of: run => run.steps },
  ranks: { title: "Ranks", of: run => run.ranks },
};

/** Return the names of all values that runs have, those that judge a run first. */
function metricNames(runs) {
  const counts = new Map();
  for (const run of runs) for (const name of Object.keys(run.values || {})) counts.set(name, (counts.get(name) || 0) + 1);
  const rank = name => name.startsWith("val/") ? 0 : name === "train/loss" ? 1 : name === "throughput" ? 2
    : name.startsWith("train/") ? 3 : name.startsWith("perf/") ? 4 : 5;
  const first = name => ["val/loss", "val/accuracy"].includes(name) ? 0 : 1;
  return [...counts.keys()].sort((a, b) => rank(a) - rank(b) || first(a) - first(b) || counts.get(b) - counts.get(a)
    || (a < b ? -1 : 1));
}

/** Return a setting of a run, also one that has its default; null if it is unset or not known. */
function settingOf(run, name) {
  const own = run.settings || {};
  return Object.hasOwn(own, name) ? own[name] : Object.keys(own).length ? defaults[name] ?? null : null;
}

/** Return what a column of the table shows of a run: a metric or a setting. */
const cellOf = (run, name) => run.values?.[name] ?? settingOf(run, name);

const settingNamesOf = new WeakMap();

/** Return the names of all settings, those that differ between runs of the same task first, and how many do. */
function settingNames() {
  if (!settingNamesOf.has(state.runs)) settingNamesOf.set(state.runs, orderedSettings([...state.runs.values()]));
  return settingNamesOf.get(state.runs);
}

function orderedSettings(runs) {
  const names = [...new Set([...FIRST_SETTINGS, ...runs.flatMap(run => Object.keys(run.settings || {})),
    ...Object.keys(defaults)])];
  const known = runs.filter(run => Object.keys(run.settings || {}).length);
  const differs = new Set(names.filter(name => {
    const seen = new Map();  // the first value of each task
    return known.some(run => {
      const value = JSON.stringify(settingOf(run, name));
      if (!seen.has(run.recipe)) seen.set(run.recipe, value);
      return seen.get(run.recipe) !== value;
    });
  }));
  const place = name => FIRST_SETTINGS.includes(name) ? FIRST_SETTINGS.indexOf(name) : OF_MODEL.test(name) ? 50 : 99;
  return { differs: differs.size, names: names.sort((a, b) => differs.has(b) - differs.has(a) || place(a) - place(b)
    || (a < b ? -1 : 1)) };
}

/** Return the columns that are shown: those that were chosen, else some settings that differ, and some metrics. */
function shownColumns() {
  if (state.columns) return state.columns;
  const { names, differs } = settingNames();
  const some = names.slice(0, differs).filter(name => FIRST_SETTINGS.includes(name) || OF_MODEL.test(name))
    .slice(0, MOST_SETTINGS);
  const metrics = metricNames([...state.runs.values()]);
  return [...some, ...metrics.filter(name => !/^(perf|system)\/|rate$|norm$|epoch_/.test(name))
    .slice(0, MOST_COLUMNS - some.length)];
}

const CONDITION = /^([^<>=!]+)(<=|>=|!=|=|<|>)(.*)$/;
const SIGNS = {
  "=": (a, b) => a === b, "<": (a, b) => a < b, ">": (a, b) => a > b, "<=": (a, b) => a <= b, ">=": (a, b) => a >= b,
};

/** Return the values of a run for a name in a condition: a tag, a column, or the end of one (width: model.width). */
function valuesFor(run, name) {
  if (name === "tag") return run.tags || [];
  if (Object.hasOwn(FIXED, name)) return [FIXED[name].of(run)];
  if (["recipe", "alias", "layout"].includes(name)) return [run[name]];
  const known = [...Object.keys(run.values || {}), ...Object.keys(run.settings || {}), ...Object.keys(defaults)];
  const full = known.find(each => each.toLowerCase() === name)
    || known.find(each => /[./]/.test(each) && each.toLowerCase().split(/[./]/).pop() === name);
  return full === undefined ? null : [cellOf(run, full)].filter(value => value !== null && value !== undefined);
}

/** Whether a word of the filter fits a run: a condition such as learning_rate>0.01, or a part of what describes it. */
function fits(run, word) {
  const [, name, sign, wanted] = CONDITION.exec(word) || [];
  const values = name && valuesFor(run, name);
  if (!values) return [run.id, run.alias, run.status, run.recipe, run.note, ...(run.tags || [])].join(" ").toLowerCase()
    .includes(word);
  if (!wanted) return sign === "!=" ? !values.length : values.length > 0;  // it is being typed
  const holds = (value, by) => typeof value === "number" && !Number.isNaN(Number(wanted)) ? SIGNS[by](value, Number(wanted))
    : SIGNS[by](String(value).toLowerCase(), wanted);
  return sign === "!=" ? !values.some(value => holds(value, "=")) : values.some(value => holds(value, sign));
}

function visibleRuns() {
  const words = (state.filter.toLowerCase().match(/(?:[^\s"]|"[^"]*")+/g) || []).map(word => word.replaceAll('"', ""));
  const keep = run => (state.trials || !run.study || state.selected.has(run.id))
    && words.every(word => fits(run, word));
  const down = state.sort.startsWith("-"), name = state.sort.replace("-", "");
  const of = FIXED[name]?.of || (run => cellOf(run, name));
  const compare = (a, b) => {
    const x = of(a), y = of(b), lacks = value => value === undefined || value === null || value === "";
    if (lacks(x) || lacks(y)) return lacks(x) - lacks(y);
    const [one, other] = typeof x === typeof y ? [x, y] : [String(x), String(y)];
    return (one < other ? -1 : one > other ? 1 : 0) * (down ? -1 : 1);
  };
  return [...state.runs.values()].filter(keep).sort(compare);
}

/** Return a metric or a setting as the table writes it. */
const shownCell = (name, value) => value === null || value === undefined ? ""
  : typeof value === "object" ? JSON.stringify(value) : valueOf(name, value, true);
