// The table of runs: groups, rows, ticks, choices; and the table of a search's trials.
"use strict";

const GROUPS = {  // titles of the groups to which a run belongs: one of each tag
  status: run => [run.status], recipe: run => [run.recipe || "no recipe"],
  tag: run => run.tags?.length ? run.tags : ["no tag"],
  ranks: run => [`${run.ranks ?? "?"} rank${run.ranks === 1 ? "" : "s"}`],
};
/** Return the rows of the table in their order, with a title for each group; ticked runs come first. */
function groupsOf(runs) {
  const found = new Map();
  const ticked = runs.filter(run => state.selected.has(run.id));
  if (ticked.length) found.set(`ticked (${ticked.length})`, ticked);
  const ofSetting = run => [`${state.group} ${shownCell(state.group, cellOf(run, state.group)) || "–"}`];
  const group = GROUPS[state.group] || (state.group ? ofSetting : null);
  for (const run of runs.filter(run => !state.selected.has(run.id))) {
    for (const title of group ? group(run) : [ticked.length ? "others" : ""]) {
      if (!found.has(title)) found.set(title, []);
      found.get(title).push(run);
    }
  }
  return new Map([...found].sort(([a], [b]) => a.startsWith("no ") - b.startsWith("no ")));
}

function viewRuns() {
  const runs = visibleRuns(), columns = shownColumns(), groups = groupsOf(runs);
  const hidden = state.trials ? 0 : [...state.runs.values()].filter(run => run.study).length;
  const tasks = new Map();  // what is best is so among runs of the same task
  for (const run of runs) tasks.set(run.recipe, [...(tasks.get(run.recipe) || []), run]);
  const best = new Map([...tasks].map(([task, members]) => [task, Object.fromEntries(columns.map(name =>
    [name, bestOf(members.map(run => run.values?.[name]), name)]))]));
  const rows = new Set();  // a run that is in several groups has its identifier in the first
  const head = h("tr", {}, h("th", {}, h("input", { type: "checkbox", id: "all", ariaLabel: "tick all",
    checked: runs.length > 0 && runs.every(run => state.selected.has(run.id)),
    onchange: event => tick(runs.map(run => run.id), event.target.checked) })),
    Object.entries(FIXED).map(([name, { title }]) => sortHead(name, title)),
    columns.map(name => sortHead(name, name, unitOf(name) === "samples/s" ? "samples/s" : "")));
  const bodies = [...groups].map(([title, members]) => h("tbody", {},
    title ? h("tr", { className: "group" }, h("th", { colSpan: 7 + columns.length },
      state.group && !title.startsWith("ticked") ? `${title} (${members.length})` : title)) : null,
    members.map(run => runRow(run, columns, best.get(run.recipe), !rows.has(run.id) && rows.add(run.id)))));
  return [h("div", { className: "scroll" }, h("table", { className: "runs" }, h("thead", {}, head), bodies)),
    runs.length ? null : empty(`No run matches "${state.filter}".`),
    hidden ? h("p", { className: "soft" }, `${hidden} trials of searches are not listed: `,
      h("a", { href: addressOf("studies") }, "see the searches"), ", or ", h("button", { type: "button",
        className: "link", onclick: () => { state.trials = true; changed(); } }, "list them here"), ".") : null]
    .filter(Boolean);
}

function bestOf(values, name) {
  const known = values.filter(Number.isFinite), way = better(name);
  return !way || known.length < 2 ? null : way > 0 ? Math.max(...known) : Math.min(...known);
}

function sortHead(name, title, unit = "") {
  const on = state.sort.replace("-", "") === name, down = state.sort.startsWith("-");
  const order = on ? (down ? "descending" : "ascending") : "none";
  return h("th", { scope: "col", ariaSort: order, className: FIXED[name] ? `c-${name}` : "c-value" },
    h("button", { type: "button", id: `sort ${name}`, onclick: () => {
      state.sort = on ? (down ? name : `-${name}`) : name === "name" ? name : `-${name}`;
      changed();
    } }, title, unit ? h("small", {}, ` ${unit}`) : null, on ? (down ? " ↓" : " ↑") : ""));
}

function progress(run) {
  const part = run.total_steps ? Math.min(1, run.steps / run.total_steps) : run.status === "finished" ? 1 : 0;
  return h("span", { className: "progress", title: `${share(part)} of the steps` },
    h("i", { className: run.status, style: { width: `${100 * part}%` } }));
}

const pill = run => h("span", { className: `status ${run.status}`, title: run.reason || "" }, run.status);

/** Filter by a tag, or show all runs again. */
function filterByTag(tag) {
  const word = `tag=${/\s/.test(tag) ? `"${tag}"` : tag}`;
  state.filter = state.filter === word ? "" : word;
  changed();
}

function runRow(run, columns, best, isFirst) {
  const on = state.selected.has(run.id);
  const tags = (run.tags || []).map(tag => h("button", { type: "button", className: "tag",
    title: `only runs with the tag ${tag}`, onclick: () => filterByTag(tag) }, tag));
  const why = run.reason ? h("div", { className: "why soft", title: run.reason }, run.reason) : null;
  return h("tr", { ...(isFirst ? { id: `row ${run.id}` } : {}), className: [on ? "on" : "", state.cursor === run.id ? "at" : ""].join(" ") },
    h("td", {}, h("input", { type: "checkbox", ...(isFirst ? { id: `run ${run.id}` } : {}), checked: on,
      ariaLabel: `tick ${run.id}`, onchange: event => tick([run.id], event.target.checked) })),
    h("th", { scope: "row", className: "c-name" }, h("div", { className: "named" }, h("span", {}, on ? swatch(run.id) : null,
      h("a", { href: addressOf("run", { run: run.id }), title: run.id }, shortName(run.id))),
      run.alias ? h("b", { className: "alias" }, run.alias) : null, tags),
      run.note ? h("div", { className: "why soft", title: run.note }, run.note) : null),
    h("td", { className: "c-status" }, pill(run), why),
    h("td", { title: run.started ? clock(run.started) : "" }, when(run.started)), h("td", {}, duration(run.seconds || null)),
    h("td", { className: "c-steps", "data-title": "steps" }, run.total_steps ? `${number(run.steps)} of ${number(run.total_steps)}`
      : number(run.steps), progress(run)),
    h("td", { "data-title": "ranks" }, number(run.ranks)),
    columns.map(name => h("td", { "data-title": name,
      className: run.values?.[name] === best[name] && best[name] !== null ? "value best" : "value" }, shownCell(name, cellOf(run, name)))));
}

/** Return the choice of columns, groups and the actions above the table. */
function runTools() {
  const runs = [...state.runs.values()], metrics = metricNames(runs), { names, differs } = settingNames();
  const shown = shownColumns(), all = [...new Set([...names, ...metrics])];
  const boxes = (title, some) => {
    const kept = some.filter(name => name.toLowerCase().includes(state.column.toLowerCase()));
    return kept.length ? [h("b", { className: "soft" }, title), kept.map(name => h("label", {}, h("input", {
      type: "checkbox", id: `column ${name}`, checked: shown.includes(name), onchange: event => {
        state.columns = all.filter(each => each === name ? event.target.checked : shown.includes(each));
        changed();
      } }), name))] : [];
  };
  const lists = () => [boxes("metrics", metrics), boxes("settings that differ", names.slice(0, differs)),
    boxes("other settings", names.slice(differs))].flat(Infinity);
  const list = h("div", { className: "columns-list" }, lists());
  const choice = h("details", { className: "menu wide", id: "columns" }, h("summary", {}, "Columns"), h("div", {},
    h("input", { type: "search", id: "column", placeholder: "Find a column", ariaLabel: "Find a column",
      value: state.column, oninput: event => { state.column = event.target.value; list.replaceChildren(...lists()); } }), list,
    state.columns ? h("button", { type: "button", id: "usual-columns",
      onclick: () => { state.columns = null; changed(); } }, "The usual columns") : null));
  const group = h("label", {}, "group by ", h("select", { id: "group", onchange: event => {
    state.group = event.target.value;
    changed();
  } }, ["", ...Object.keys(GROUPS), ...new Set([...shown.filter(name => names.includes(name)),
    ...(state.group && !GROUPS[state.group] ? [state.group] : [])])].map(name => h("option", { value: name, selected: name === state.group },
    name || "nothing"))));
  const trials = [...state.runs.values()].some(run => run.study) ? h("label", {}, h("input", { type: "checkbox",
    id: "trials", checked: state.trials, onchange: event => { state.trials = event.target.checked; changed(); } }),
  " trials of searches") : null;
  return [group, choice, trials, state.selected.size ? h("a", { className: "button main", href: addressOf("compare") },
    `Compare ${state.selected.size}`) : h("span", { className: "soft" }, "Tick runs to compare them."),
  state.selected.size ? h("button", { type: "button", id: "none", onclick: () => tick([...state.selected], false) },
    "Untick all") : null];
}

/** Tick or untick runs; a run whose colour another ticked one has taken meanwhile gets the next. */
function tick(ids, on) {
  for (const id of ids) {
    if (on && [...state.selected].some(other => slots.get(other) === slots.get(id))) slots.delete(id);
    if (on) { state.selected.add(id); look(id); } else state.selected.delete(id);
  }
  state.range = null;
  asked = performance.now();
  changed();
}

/** Return the ticked runs, each with its line and a button that unticks it. */
const compareHead = () => [h("div", { className: "chips" }, chosen().map(run => h("span", { className: "chip",
  title: run.id }, swatch(run.id), h("a", { href: addressOf("run", { run: run.id }) }, shortName(run.id)),
h("button", { type: "button", ariaLabel: `untick ${run.id}`, onclick: () => tick([run.id], false) }, "×"))))];

function viewStudies() {
  const rows = studies().map(name => {
    const study = cache.study.get(name)?.value, trials = trialsOf(name);
    const best = study?.trials.find(each => each.number === study.best);
    return [h("th", { scope: "row" }, h("a", { href: addressOf("study", { study: name }) }, name)),
      number(trials.length), number(trials.filter(run => run.status === "running").length),
      study ? `${study.metric} ${best ? valueOf(study.metric, best.value) : "–"}` : "",
      best ? h("td", {}, h("a", { href: addressOf("run", { run: best.run }) }, `trial ${best.number}`)) : "",
      h("td", { className: "wide" }, best ? paramWords(best.params) : "")];
  });
  return rows.length ? [tableOf(["search", "trials", "running", "best value", "best trial", "with"], rows, true)]
    : [empty(["There are no searches in this folder. Start one: ", h("code", {}, "phalanx tune digits --space space.toml")])];
}

const paramWords = params => Object.entries(params).map(([name, value]) => `${name} ${number(value)}`).join(", ");

function viewStudy() {
  const study = cache.study.get(state.study)?.value;
  if (!study) return [empty("Loading ...")];
  const names = [...new Set(study.trials.flatMap(trial => Object.keys(trial.params)))];
  const goodness = trial => trial.value === null ? -Infinity : study.mode === "max" ? trial.value : -trial.value;
  const rows = [...study.trials].sort((a, b) => goodness(b) - goodness(a)).map(trial => {
    const run = state.runs.get(trial.run), isBest = trial.number === study.best;
    return [h("td", {}, run ? h("input", { type: "checkbox", checked: state.selected.has(run.id), id: `run ${run.id}`,
      ariaLabel: `tick trial ${trial.number}`, onchange: event => tick([run.id], event.target.checked) }) : ""),
    h("th", { scope: "row" }, run ? h("a", { href: addressOf("run", { run: run.id }) }, `trial ${trial.number}`)
      : `trial ${trial.number}`, isBest ? h("span", { className: "tag good" }, "best") : null),
    h("td", {}, h("span", { className: `status ${trial.state}` }, trial.state)),
    h("td", { className: isBest ? "value best" : "value" }, valueOf(study.metric, trial.value)),
    ...names.map(name => h("td", { className: "value" }, number(trial.params[name]))),
    duration(run?.seconds), h("td", { className: "wide bad" }, trial.cause)];
  });
  const right = title => h("th", { scope: "col", className: "value" }, title);
  return [tableOf(["", "trial", "state", right(study.metric), ...names.map(right), "training time", ""], rows, true)];
}

function studyHead() {
  const study = cache.study.get(state.study)?.value;
  const way = study ? `${study.mode === "max" ? "highest" : "lowest"} ${study.metric}` : "";
  return [h("div", { className: "title" }, h("a", { className: "back", href: addressOf("studies") }, "Searches"),
    h("h1", {}, state.study), study?.files["study.html"] ? h("a", { className: "button",
      href: fileAddress(state.study, "study.html"), target: "_blank" }, "Charts of the search") : null,
    state.selected.size ? h("a", { className: "button main", href: addressOf("compare") },
      `Compare ${state.selected.size}`) : null),
  h("p", { className: "soft" }, way ? `It looks for the ${way}. ` : "", study?.path || "")];
}
