// The page of one run: how it stands and why, its command and environment, files, logs; tags, note, removal.
"use strict";

const LONG_ENOUGH = 10;  // seconds: where the time of a shorter run went says nothing about training
const fileAddress = (id, path) => `files/${[...id.split("/"), ...path.split("/")].map(encodeURIComponent).join("/")}`;

function runHead(run) {
  const study = run.study ? h("a", { className: "back", href: addressOf("study", { study: run.study }) }, run.study)
    : h("a", { className: "back", href: addressOf("runs") }, "Runs");
  const tags = (run.tags || []).map(tag => h("span", { className: "tag" }, tag, stored ? null : h("button", {
    type: "button", ariaLabel: `remove the tag ${tag}`, onclick: () => act(change(run.id, { untag: tag })) }, "×")));
  const edit = stored ? [] : [
    h("button", { type: "button", className: "link", id: "edit-name", onclick: () => question({ title: "Name this run",
      text: "Every command takes the name, and this run alone has it: phalanx evaluate NAME", field: run.alias || "",
      yes: "Save", then: name => change(run.id, { name }) }) }, run.alias ? "edit name" : "+ name"),
    h("button", { type: "button", className: "link", id: "add-tag", onclick: () => question({ title: "Tag this run",
      text: "A tag is a label; any number of runs have it. In the table: group by tag, or filter by tag=NAME", field: "",
      yes: "Add", then: tag => change(run.id, { tag }) }) }, "+ tag"),
    h("button", { type: "button", className: "link", id: "edit-note", onclick: () => question({ title: "Note",
      field: run.note || "", lines: 4, yes: "Save", then: note => change(run.id, { note }) }) },
    run.note ? "edit note" : "+ note")];
  const buttons = stored ? [] : [
    h("label", { className: "button" }, h("input", { type: "checkbox", checked: state.selected.has(run.id),
      id: `run ${run.id}`, onchange: event => tick([run.id], event.target.checked) }), " compare"),
    run.study ? null : h("button", { type: "button", className: "danger", id: "remove", onclick: () => question({
      title: `Delete ${run.id}?`, text: "Its folder with all checkpoints, logs and events is removed from the disk. "
        + "This cannot be undone.", yes: "Delete", danger: true, then: async () => {
        await change(run.id, { remove: true });
        location.hash = addressOf("runs");
      } }) }, "Delete")];
  return [h("div", { className: "title" }, study, h("h1", {}, swatch(run.id), shortName(run.id)), run.alias
    ? h("b", { className: "alias" }, run.alias) : null, pill(run),
    h("span", { className: "grow" }), buttons),
  h("div", { className: "marks" }, tags, edit),
  run.note ? h("p", { className: "note" }, run.note) : null, endOf(run)].filter(Boolean);
}

/** Say why a run ended, and for a failure where to read on. */
function endOf(run) {
  if (!run.reason) return null;
  const first = cache.detail.get(run.id)?.value?.failures[0];
  const log = first ? `logs/rank-${first.rank}.log` : "";
  const place = typeof first?.step === "number" ? `, step ${number(first.step)}` : "";
  const severe = ["failed", "killed", "damaged"].includes(run.status);
  return h("p", { className: severe ? "end-of bad" : "end-of" },
    h("b", {}, `${run.status}${first ? ` on rank ${first.rank}` : ""}${place}: `), run.reason,
    first ? " · " : null, first ? h("a", { href: addressOf("run", { run: run.id, tab: "logs", log }) }, `Log of rank ${first.rank}`) : null,
    first ? " · " : null, first ? h("a", { href: addressOf("run", { run: run.id, tab: "events" }) }, "Traceback") : null);
}

const tile = (title, value, more) => h("div", { className: "tile" }, h("span", {}, title), h("b", {}, value),
  more ? h("small", {}, more) : null);

function tiles(run) {
  const detail = cache.detail.get(run.id)?.value;
  const total = Object.values(detail?.goodput || {}).reduce((sum, seconds) => sum + seconds, 0);
  const rate = run.values?.throughput ?? run.values?.["perf/samples_per_second"];
  const tokens = run.values?.["perf/tokens_per_second"];
  return h("div", { className: "tiles" },
    tile("Steps", run.total_steps ? `${number(run.steps)} of ${number(run.total_steps)}` : number(run.steps), progress(run)),
    run.best ? tile(run.best.name.startsWith("best") ? run.best.name : `Best ${run.best.name}`,
      valueOf(run.best.name, run.best.value)) : null,
    run.values?.["train/loss"] !== undefined ? tile("Last loss", number(run.values["train/loss"])) : null,
    rate !== undefined ? tile("Speed", number(rate), `samples/s${tokens ? `, ${number(tokens)} tokens/s` : ""}`) : null,
    tile("Training time", duration(run.seconds || null), run.started ? `from ${clock(run.started).slice(0, 16)}` : ""),
    total >= LONG_ENOUGH ? tile("Productive", share(detail.goodput.productive / total),
      `of ${duration(total)} with start-up`) : null,
    run.layout ? tile("Ranks", number(run.ranks), run.layout) : null);
}

/** Return a text that can be copied with one click. */
function copied(text) {
  return h("div", { className: "copied" }, h("pre", { className: "command", tabIndex: 0 }, text),
    h("button", { type: "button", className: "copy", onclick: async event => {
      const button = event.target;
      try { await navigator.clipboard.writeText(text); } catch { getSelection().selectAllChildren(
        button.previousSibling); document.execCommand("copy"); }
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    } }, "Copy"));
}

function viewOverview() {
  const run = chosen()[0], detail = details()[0];
  if (!detail) return [empty("Loading ...")];
  const name = run.id.includes("/") ? `runs/${run.id}` : run.id;
  const next = run.status === "running" ? ["top"] : detail.checkpoints.some(each => each.exists)
    ? [...(run.status === "finished" ? [] : ["resume"]), "evaluate", "export"] : [];
  const cell = value => typeof value === "object" || String(value).length > 200 ? h("details", {}, h("summary", {},
    typeof value === "object" ? `${Object.keys(value).length} entries` : "show"), h("pre", {},
    typeof value === "object" ? Object.entries(value).map(([key, each]) => Array.isArray(value) ? each
      : `${key} ${each}`).join("\n") : value)) : String(value);
  const { environment: versions, ...rest } = detail.environment, environment = { folder: detail.path, ...rest, ...versions };
  return [h("h2", {}, "Command"), copied(detail.command),
    next.length ? h("p", { className: "soft" }, "Next: ", next.map((verb, i) => [i ? " · " : "",
      h("code", {}, `phalanx ${verb} ${name}`)])) : null,
    h("div", { className: "columns" },
      h("section", {}, h("h2", {}, "Environment"), tableOf(null, Object.entries(environment).map(([key, value]) =>
        [h("th", { scope: "row" }, key), h("td", { className: "wide" }, cell(value))]))),
      h("section", {}, h("h2", {}, "Files"), viewFiles(run, detail),
        detail.goodput ? [h("h2", {}, "Where the time went"), h("div", { className: "card" }, goodput(detail))] : null)),
  ].filter(Boolean);
}

const ABOUT_FILES = [[/^events\.jsonl$/, "all events, one per line"], [/^config\.toml$/, "all settings"],
  [/^run\.json$/, "command and environment"], [/^profile\/trace\.json/, "trace of all ranks, for Perfetto"],
  [/^profile\//, "trace of one rank"], [/memory\.json$/, "memory of a rank"], [/error\.json$/, "error of a rank"],
  [/\.log$/, "output of a rank"],
  [/^packages\.txt$/, "installed packages"], [/^changes\.diff$/, "what differed from the commit"], [/collectives\.json$/, "last collectives of a rank"], [/\.html$/, "page"]];

function viewFiles(run, detail) {
  const rows = Object.entries(detail.files).map(([path, size]) => [
    h("td", { className: "wide" }, stored ? path : path.endsWith(".log")
      ? h("a", { href: addressOf("run", { run: run.id, tab: "logs", log: path }) }, path)
      : h("a", { href: fileAddress(run.id, path), target: "_blank" }, path)),
    h("td", { className: "soft" }, ABOUT_FILES.find(([pattern]) => pattern.test(path))?.[1] || ""),
    h("td", { className: "value" }, bytes(size))]);
  return tableOf(null, rows);
}

// Logs ----------------------------------------------------------------------------------------------------------------

const shownLog = { place: "", to: -1, text: "" };
const MOST_SIGNS = 400000;

function viewLogs() {
  const run = chosen()[0], detail = details()[0];
  if (!detail) return [empty("Loading ...")];
  if (stored) return [empty("Logs are not part of this file.")];
  const files = Object.keys(detail.files).filter(path => path.endsWith(".log"));
  if (!files.length) return [empty("No rank has printed anything: what ranks print is in logs/rank-N.log of the run.")];
  if (!files.includes(state.log)) state.log = files[0];
  const place = `${run.id}/${state.log}`;
  if (shownLog.place !== place) { Object.assign(shownLog, { place, to: -1, text: "" }); readLog(); }
  const choice = h("select", { id: "log", onchange: event => { state.log = event.target.value; changed(); } },
    files.map(path => h("option", { selected: path === state.log }, path)));
  return [h("div", { className: "tools" }, h("label", {}, "file ", choice),
    h("a", { href: fileAddress(run.id, state.log), target: "_blank" }, "whole file"),
    h("span", { className: "soft" }, run.status === "running" ? "new lines appear by themselves" : "")),
  h("pre", { className: "end log", id: "log-text", tabIndex: 0 }, logLines())];
}

const logLines = () => shownLog.text.split("\n").map(line => h("span", {
  className: /\w(Error|Exception)\b|Traceback/.test(line) ? "bad" : "" }, `${line}\n`));

/** Read what is new in the log that is shown; follow its end where the reader is there. */
async function readLog() {
  const place = shownLog.place;
  if (!place || state.tab !== "logs" || state.page !== "run" || document.hidden) return;
  const found = await ask("log", place, { from: shownLog.to }).catch(error => ({ text: error.message, from: 0, to: -1 }));
  if (shownLog.place !== place || (!found.text && found.from === shownLog.to)) return;
  shownLog.text = ((found.from === shownLog.to ? shownLog.text : "") + found.text).slice(-MOST_SIGNS);
  shownLog.to = found.to;
  const box = at("log-text");
  if (!box) return;
  const end = box.scrollTop + box.clientHeight > box.scrollHeight - 30 || !box.dataset.read;
  box.replaceChildren(...logLines());
  box.dataset.read = "1";
  if (end) box.scrollTop = box.scrollHeight;
}
setInterval(readLog, 1000);

// Questions -----------------------------------------------------------------------------------------------------------

/** Ask the reader: a text, a field to fill in, or yes or no; then do it, and say what went wrong. */
function question({ title, text, field, lines, yes, danger, then }) {
  const box = at("question");
  const input = field === undefined ? null : h(lines ? "textarea" : "input", { value: field, id: "answer",
    ariaLabel: title, rows: lines || 1 });
  const problem = h("p", { className: "bad", role: "alert" });
  const form = h("form", { method: "dialog", onsubmit: async event => {
    event.preventDefault();
    try { await then(input?.value ?? ""); box.close(); } catch (error) { problem.textContent = error.message; }
  } }, h("h2", {}, title), text ? h("p", { className: "soft" }, text) : null, input, problem,
  h("div", { className: "tools" }, h("button", { className: danger ? "danger" : "main", id: "yes" }, yes),
    h("button", { type: "button", onclick: () => box.close() }, "Cancel")));
  box.replaceChildren(form);
  box.showModal();
  if (danger) form.lastChild.lastChild.focus();
}

const act = promise => promise.catch(error => question({ title: "That did not work", text: error.message, yes: "Close",
  then: () => null }));
