"""The pages of `phalanx ui` in real Chromium: the table of runs, one run, comparisons, searches, and changes."""

from __future__ import annotations

import http.client
import json
import sqlite3
from dataclasses import replace

import pytest
from browser import browser
from test_ui import append, get, served, started, step
from waiting import LIMIT_SECONDS

from phalanx.observe.events import CheckpointSaved, MetricsReported, RunEnded

MARKUP = "<img src=x onerror=alert(1)>"
LOSSES = {"a-good": 0.2, "b-fair": 0.4, "c-poor": 0.8, "d-diverged": 1e9}


@pytest.fixture(scope="module")
def page():
    with browser() as found:
        found.resize(1280)
        yield found


def record(folder, **more) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    words = {"command": ["phalanx", "train", MARKUP], "directory": "/", "settings": {}, "commit": "abc123", **more}
    (folder / "run.json").write_text(json.dumps(words))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Four runs that ended, one of them diverged, and a search with two trials."""
    folder = tmp_path_factory.mktemp("pages") / "runs"
    for place, (name, loss) in enumerate(LOSSES.items()):
        begin = 1000.0 + place
        record(
            folder / name, started=begin, recipe={"name": "digits" if place < 2 else "gpt", "model": {"width": place}}
        )
        optimizer = "sgd" if place else "adamw"
        (folder / name / "config.toml").write_text(f'learning_rate = {10.0**-place}\noptimizer = "{optimizer}"\n')
        val = MetricsReported(step=20, epoch=1, split="val", values={"loss": loss}, time=begin + 20)
        reason = "early stopping, val/loss has not improved" if place == 0 else ""
        end = RunEnded(status="finished", step=20, total_time=20.0, throughput=50.0, reason=reason, time=begin + 21)
        saved = [
            CheckpointSaved(step=n, path=f"gone/step-{n}", seconds=0.1, bytes=5 << 30, time=begin + n) for n in (5, 9)
        ]
        losses = [step(number, loss * (21 - number)) for number in range(1, 21)]
        append(folder / name, started(name, time=begin), *losses, *saved, val, end)
    study = folder / "tune-x"
    for number in range(2):
        append(study / "trials" / f"{number:04d}", started("trial", time=900.0 + number), step(1, 1.0))
    (study / "study.html").write_text("<title>charts</title><script>document.title = origin</script>")
    with sqlite3.connect(study / "study.db") as base:
        base.executescript(
            """CREATE TABLE study_user_attributes (key, value_json); CREATE TABLE trials (trial_id, number);
            CREATE TABLE trial_user_attributes (trial_id, key, value_json); CREATE TABLE trial_values (trial_id, value);
            INSERT INTO study_user_attributes VALUES ('metric', '"\\"val/loss\\""'), ('mode', '"\\"min\\""');
            INSERT INTO trials VALUES (1, 0), (2, 1); INSERT INTO trial_values VALUES (1, 0.5), (2, 0.25);
            INSERT INTO trial_user_attributes VALUES (1, 'params', '"{\\"lr\\": 0.1}"'), (1, 'state', '"finished"'),
            (2, 'params', '"{\\"lr\\": 0.01}"'), (2, 'state', '"finished"');"""
        )
    base.close()
    return folder


@pytest.fixture(scope="module")
def address(runs):
    with served(cwd=runs.parent) as found:
        yield found


def opened(page, place: str) -> str:
    page.open(place)
    page.wait("document.body.dataset.drawn")
    return page.run("document.querySelector('main').innerText")


def names(page) -> list[str]:
    return page.run("[...document.querySelectorAll('.runs tr[id]')].map(row => row.id.slice(4))")


def test_the_table_sorts_groups_filters_and_keeps_its_state_in_the_address(page, address):
    text = opened(page, address)
    assert names(page) == ["d-diverged", "c-poor", "b-fair", "a-good"], "the newest first, and no trials"
    assert "2 trials of searches are not listed" in text
    assert page.run("document.querySelector('.runs .best').innerText") in ("0.8", "50"), "the best value is marked"
    page.run("document.getElementById('sort val/loss').click()")
    page.run("document.getElementById('run c-poor').click()")
    choose = "const box = document.getElementById('{}'); box.value = '{}'; box.dispatchEvent(new Event('{}'))"
    page.run(f"(() => {{ {choose.format('group', 'recipe', 'change')} }})()")
    page.wait("document.querySelectorAll('tr.group').length === 3")
    page.wait("state.sort === '-val/loss' && state.selected.has('c-poor')")
    assert names(page) == ["c-poor", "d-diverged", "b-fair", "a-good"], "ticked, then the largest loss of each group"
    kept = page.run("location.href")
    opened(page, kept)
    assert names(page) == ["c-poor", "d-diverged", "b-fair", "a-good"]
    page.run(f"(() => {{ {choose.format('filter', 'digits fair', 'input')} }})()")
    page.wait("document.querySelectorAll('.runs tr[id]').length === 1")
    assert names(page) == ["b-fair"]
    page.run("location.hash = '#page=runs&filter=&columns=train/loss'")
    page.wait("document.querySelectorAll('.runs thead th').length === 8")
    assert page.problems == []


def typed(page, field: str, text: str) -> None:
    box = f"document.getElementById('{field}')"
    page.run(f"{box}.focus(); {box}.value = {json.dumps(text)}; {box}.dispatchEvent(new Event('input'))")


def filtered(page, text: str) -> list[str]:
    page.run(f"state.filter = {json.dumps(text)}; changed()")
    page.wait("document.querySelectorAll('.runs tr[id]').length === visibleRuns().length")
    return names(page)


def test_settings_are_columns_that_sort_group_and_filter(page, address):
    opened(page, address)
    assert page.run("shownColumns().slice(0, 2)") == ["learning_rate", "optimizer"], "what differs is shown by itself"
    page.run("document.getElementById('sort learning_rate').click()")
    page.wait("state.sort === '-learning_rate'")
    page.wait("document.querySelector('.runs tr[id]').id === 'row a-good'")
    assert names(page) == ["a-good", "b-fair", "c-poor", "d-diverged"], "0.001 is the default"
    assert "0.001" in page.run("document.getElementById('row d-diverged').innerText")
    assert filtered(page, "learning_rate>0.01") == ["a-good", "b-fair"]
    assert filtered(page, "optimizer=sgd learning_rate<=0.01") == ["c-poor", "d-diverged"]
    assert filtered(page, "width=1") == ["b-fair"], "the end of a name: model.width"
    assert filtered(page, "optimizer!=sgd") == ["a-good"]
    assert len(filtered(page, "learning_rate>")) == 4, "a condition that is being typed hides nothing"
    assert filtered(page, "nothing=1") == []
    assert len(filtered(page, "")) == 4
    page.run("document.getElementById('columns').open = true")
    typed(page, "column", "sync_")
    assert "sync_every" in page.run("document.querySelector('.columns-list').innerText")
    page.run("document.getElementById('column sync_every').click()")
    page.wait("document.querySelector('.runs thead').innerText.includes('sync_every')")
    assert "columns=" in page.run("location.hash")
    key = "dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape', bubbles: true}))"
    page.run(f"document.getElementById('columns').{key}")
    assert page.run("[document.getElementById('columns').open, state.page]") == [False, "runs"], "Esc closes the menu"
    page.run("document.getElementById('usual-columns').click()")
    page.wait("!document.querySelector('.runs thead').innerText.includes('sync_every')")
    page.run("state.group = 'optimizer'; changed()")
    page.wait("document.querySelectorAll('tr.group').length === 2")
    assert "optimizer sgd (3)" in page.run("document.querySelector('.runs').innerText")
    assert page.problems == []


def test_tags_are_labels_of_many_runs_to_group_and_filter_by(page, address, runs):
    for name, tags in {"a-good": ["sweep", "wide"], "b-fair": ["sweep"]}.items():
        document = json.loads((runs / name / "run.json").read_text())
        (runs / name / "run.json").write_text(json.dumps({**document, "tags": tags, "alias": f"the-{name}"}))
    opened(page, f"{address}#page=runs&group=tag")
    titles = "[...document.querySelectorAll('tr.group')].map(row => row.innerText)"
    assert page.run(titles) == ["sweep (2)", "wide (1)", "no tag (2)"]
    assert page.run("document.querySelectorAll('[id=\"row a-good\"]').length") == 1, "it is in two groups"
    assert "the-a-good" in page.run("document.querySelector('.runs').innerText")
    assert filtered(page, "tag=sweep") == ["b-fair", "a-good"]
    page.run("filterByTag('wide')")
    page.wait("document.getElementById('filter').value === 'tag=wide'")
    assert names(page) == ["a-good"]
    assert page.problems == []


def test_the_best_value_is_so_among_runs_of_the_same_recipe(page, address):
    opened(page, f"{address}#page=runs&columns=val/loss&group=&filter=")
    best = page.run(
        "[...document.querySelectorAll('.runs tr[id]')].filter(row => row.querySelector('.best')).map(row => row.id)"
    )
    assert best == ["row c-poor", "row a-good"], "one of gpt, one of digits"


def test_the_box_at_a_chart_has_values_of_this_step_alone_and_covers_no_line(page, address, runs):
    append(runs / "e-short", started("e-short", time=500.0), *(step(number, 3.0) for number in range(1, 6)))
    opened(page, f"{address}#page=compare&runs=a-good,b-fair,e-short&tab=curves")
    page.wait("charts.get('train/loss')?.plot")
    point = """(() => {{ const {{plot}} = charts.get('train/loss'), box = plot.over.getBoundingClientRect();
      for (const kind of ['mouseenter', 'mousemove']) plot.over.dispatchEvent(new MouseEvent(kind, {{bubbles: true,
        clientX: box.left + plot.valToPos({}, 'x'), clientY: box.top + 60}}));
      return document.getElementById('tip').innerText.split('\\n') }})()"""
    rows = page.run(point.format(3))
    assert rows[0] == "step 3"
    assert [row.split()[-1] for row in rows[1:]] == ["b-fair", "a-good", "e-short"]
    rows = page.run(point.format(10))
    assert [row.split()[-1] for row in rows[1:]] == ["b-fair", "a-good"], "e-short ended at step 5"
    dots = "[...charts.get('train/loss').plot.over.querySelectorAll('.u-cursor-pt')]"
    assert page.run(f"{dots}.filter(dot => !dot.classList.contains('u-off') && dot.offsetWidth).length") >= 2
    overlap = """(() => {{ const a = document.getElementById('tip').getBoundingClientRect(),
      b = charts.get('train/loss').figure.getBoundingClientRect();
      return a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom }})()"""
    for width in (1440, 390):
        page.resize(width)
        page.run("document.querySelector('[aria-label=\"train/loss\"]').scrollIntoView({block: 'center'})")
        page.wait(f"charts.get('train/loss').plot.width < {width}")
        page.run(point.format(10))
        assert page.run(overlap) is False, width
    page.resize(1280)
    assert page.problems == []


def test_learning_rates_of_different_size_are_all_shown(page, address, runs):
    for name, rate in (("f-slow", 1e-4), ("g-fast", 0.3)):
        append(
            runs / name, started(name, time=400.0), *(replace(step(n, 1.0), learning_rate=rate) for n in range(1, 6))
        )
    opened(page, f"{address}#page=compare&runs=f-slow,g-fast&tab=curves")
    chart = "charts.get('train/learning_rate')"
    page.wait(f"{chart}?.plot")
    assert page.run(f"[{chart}.limit, {chart}.plot.scales.y.distr]") == [None, 3]
    page.run("set('train/learning_rate', {log: false})")
    page.wait(f"{chart}.plot.scales.y.distr !== 3")
    assert page.run(f"{chart}.limit") is None


def test_the_config_of_one_run_marks_what_differs_from_the_defaults(page, address):
    opened(page, f"{address}#page=run&run=b-fair&tab=config")
    page.wait("document.querySelector('.config') !== null")
    rows = "[...document.querySelectorAll('.config tbody tr')].map(row => row.children[0].innerText)"
    marked = "[...document.querySelectorAll('.config td.differs')].map(cell => cell.parentNode.children[0].innerText)"
    assert page.run(marked) == ["learning_rate", "optimizer", "model.width"]
    page.run("document.getElementById('only-changed').click()")
    page.wait(f"{rows}.length === 3")
    typed(page, "setting", "rate")
    page.wait(f"{rows}.length === 1")
    assert page.run(f"[document.activeElement.id, document.activeElement.value, ...{rows}]") == [
        "setting",
        "rate",
        "learning_rate",
    ]


def test_on_a_phone_every_table_can_be_read(page, address):
    page.resize(390)
    cells = "[...document.querySelectorAll('#body .stacks *')]"
    cut = f"{cells}.filter(each => each.getBoundingClientRect().right > innerWidth).length"
    for place in ("page=studies", "page=run&run=a-good&tab=checkpoints", "page=study&study=tune-x"):
        opened(page, f"{address}#{place}")
        page.run("document.getElementById('gone')?.click()")
        page.wait("document.querySelector('#body .stacks') !== null")
        assert page.run(cut) == 0, place
    opened(page, f"{address}#page=run&run=a-good")
    tiles = "[...document.querySelectorAll('.tile')].at(-1).getBoundingClientRect().right"
    assert page.run(f"document.querySelector('.tiles').getBoundingClientRect().right - {tiles} < 3"), "no empty cell"
    opened(page, f"{address}#page=compare&runs=a-good,b-fair,c-poor,d-diverged&tab=config")
    page.wait("document.querySelector('.config') !== null")
    assert (
        page.run(
            "(() => { const box = document.querySelector('.chips'); return box.scrollHeight - box.clientHeight })()"
        )
        <= 0
    )
    page.resize(1280)
    assert page.problems == []


def test_an_empty_folder_says_what_to_type(page, tmp_path):
    with served(cwd=tmp_path) as place:
        for view in ("page=runs", "page=compare"):
            text = opened(page, f"{place}#{view}")
            assert "No runs yet" in text
            assert page.run("document.querySelector('pre.command').innerText") == "phalanx train digits"
            assert (
                page.run("document.querySelector('.copy') !== null && document.getElementById('tabs').innerText") == ""
            )
        page.leave()


def test_a_diverged_run_does_not_flatten_the_others_and_every_line_has_a_name(page, address):
    opened(page, f"{address}#page=compare&runs=a-good,b-fair,c-poor,d-diverged")
    high = "charts.get('train/loss').plot.scales.y.max"
    assert page.run(high) < 100
    box = "document.querySelector('[aria-label=\"train/loss\"]')"
    assert page.run(f"[...{box}.querySelectorAll('.who')].map(each => each.innerText)") == list(LOSSES)[::-1]
    assert page.run("new Set(chosen().map(run => JSON.stringify(look(run.id)))).size") == 4
    page.wait(f"{box}.innerText.includes('1 run leaves the axis')")
    page.run(f"{box}.querySelector('button.link').click()")
    page.wait(f"{high} > 1e9")
    page.run("set('train/loss', {log: true})")
    page.wait("charts.get('train/loss').plot.scales.y.distr === 3")
    assert page.run("charts.get('val/loss').plot.scales.y.distr") != 3, "of one chart alone"
    rows = page.run("tableOfChart('val/loss')").splitlines()
    assert rows[0] == 'run,step,time,"val/loss"'
    assert [row.rpartition(",")[0] for row in rows[1:3]] == ['"d-diverged",20,1023', '"c-poor",20,1022']
    page.run("set('train/loss', {hidden: true})")
    page.wait("!charts.has('train/loss')")
    assert "hidden" in page.run("location.hash")
    page.run("document.getElementById('hidden-charts').click()")
    page.wait("charts.has('train/loss')")
    before = page.run("JSON.stringify(look('d-diverged'))")
    page.run("tick(['a-good'], false)")
    assert page.run("JSON.stringify(look('d-diverged'))") == before, "a run keeps its colour"
    assert page.problems == []


def test_ten_runs_have_ten_colours_and_more_have_other_lines(page, address):
    opened(page, address)
    page.run("for (let i = 0; i < 14; i++) state.runs.set(`r${i}`, {id: `r${i}`, tags: []}), tick([`r${i}`], true)")
    looks = page.run("[...Array(14).keys()].map(i => look(`r${i}`))")
    assert len({each["colour"] for each in looks[:10]}) == 10
    assert {each["kind"] for each in looks[:10]} == {0}
    assert len({(each["colour"], each["kind"]) for each in looks}) == 14


def test_one_run_shows_why_it_ended_its_command_environment_files_and_logs(page, address, runs):
    text = opened(page, f"{address}#page=run&run=a-good")
    for words in ("early stopping", f"phalanx train '{MARKUP}'", "abc123", "events.jsonl", "20 of 100"):
        assert words in text, words
    assert "50\nsamples/s" in text
    page.run("openTab('events')")
    page.wait("document.getElementById('body').innerText.includes('run ended')")
    assert "gone/step-5" not in page.run("document.getElementById('body').innerText"), "no flood of checkpoints"
    page.run("openTab('checkpoints')")
    page.wait("document.getElementById('body').innerText.includes('also 2 that were removed')")
    page.run("document.getElementById('gone').click()")
    page.wait("document.getElementById('body').innerText.includes('5.4 GB')")
    log = runs / "b-fair" / "logs" / "rank-0.log"
    log.parent.mkdir()
    log.write_text(f"first line {MARKUP}\nValueError: no\n")
    opened(page, f"{address}#page=run&run=b-fair&tab=logs")
    page.wait("document.getElementById('log-text')?.innerText.includes('first line <img')")
    assert page.run("document.querySelector('#log-text .bad').innerText.trim()") == "ValueError: no"
    with log.open("a") as file:
        file.write("a line that came later\n")
    page.wait("document.getElementById('log-text').innerText.includes('came later')")
    assert page.run("document.querySelectorAll('main img').length") == 0
    assert page.problems == []


def test_tags_notes_and_removal_from_the_page(page, address, runs):
    record(runs / "spare", started=1.0)
    append(runs / "spare", started("spare", time=1.0), step(1, 1.0), RunEnded("finished", 1, 1.0, 1.0, time=2.0))
    opened(page, f"{address}#page=run&run=spare")

    def answer(button: str, text: str | None) -> None:
        page.run(f"document.getElementById('{button}').click()")
        if text is not None:
            page.run(f"document.getElementById('answer').value = {json.dumps(text)}")
        page.run("document.getElementById('yes').click()")

    answer("edit-name", "last")
    page.wait("document.querySelector('#question p.bad')?.innerText.includes('cannot be the name')")
    page.run("document.getElementById('question').close()")
    answer("edit-name", "my spare")
    page.wait("document.querySelector('.alias')?.innerText === 'my spare'")
    answer("add-tag", "<b>mine</b>")
    page.wait("document.querySelector('#question p.bad')?.innerText.includes('cannot be a tag')")
    page.run("document.getElementById('question').close()")
    answer("add-tag", "<b onclick=x>mine")
    page.wait("document.querySelector('.marks .tag')?.innerText.includes('<b onclick=x>mine')")
    answer("edit-note", MARKUP)
    page.wait("document.querySelector('.note')?.innerText === '" + MARKUP + "'")
    kept = json.loads((runs / "spare" / "run.json").read_text())
    assert (kept["tags"], kept["note"], kept["alias"]) == (["<b onclick=x>mine"], MARKUP, "my spare")
    page.run("location.hash = '#page=runs'")
    page.wait("document.getElementById('body').innerText.includes('onclick=x')")
    assert page.run("document.querySelectorAll('main img').length") == 0
    page.run("location.hash = '#page=run&run=spare'")
    page.wait("document.getElementById('remove') !== null")
    page.run("document.getElementById('remove').click()")
    assert (runs / "spare").exists(), "nothing is removed before the answer"
    page.run("document.getElementById('yes').click()")
    page.wait("state.page === 'runs' && !state.runs.has('spare')")
    assert not (runs / "spare").exists()
    assert [problem for problem in page.problems if "400" not in problem] == []
    page.problems.clear()


def test_a_search_links_its_trials_and_marks_the_best(page, address):
    opened(page, f"{address}#page=studies")
    page.wait("document.getElementById('body').innerText.includes('val/loss 0.25')")
    page.run("document.querySelector('#body a').click()")
    page.wait("document.querySelector('#body tbody tr')?.innerText.includes('best')")
    first = page.run("document.querySelector('#body tbody tr').innerText")
    assert "trial 1" in first
    assert "0.01" in first
    page.run("document.querySelector('#body tbody a').click()")
    page.wait("state.page === 'run' && state.run === 'tune-x/trials/0001' && document.querySelector('.tiles') !== null")
    assert page.problems == []


def post(address: str, path: str, body: object, **headers: str) -> int:
    name = address.removeprefix("http://").rstrip("/")
    connection = http.client.HTTPConnection(name, timeout=LIMIT_SECONDS)
    try:
        own = {"Origin": f"http://{name}", "Content-Type": "application/json", **headers}
        connection.request("POST", path, json.dumps(body), {key: value for key, value in own.items() if value})
        return connection.getresponse().status
    finally:
        connection.close()


def test_changes_are_taken_from_the_page_alone_and_files_of_runs_only(address, runs):
    note = {"note": "hello"}
    assert post(address, "/api/change/a-good", note) == 200
    for wrong in (
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": ""},
        {"Content-Type": "text/plain"},
    ):
        assert post(address, "/api/change/a-good", {"remove": True}, **wrong) == 403, wrong
    assert get(f"{address}api/change/a-good")[0] == 405
    for path in ("missing", "..", "%2e%2e", "tune-x", "tune-x/trials", "tune-x/trials/..", "a-good/trials/0000"):
        assert post(address, f"/api/change/{path}", {"remove": True}) == 404, path
    assert post(address, "/api/change/tune-x%2Ftrials%2F0000", {"remove": True}) == 400, "a search needs its trials"
    for body in ({}, [], {"tag": 1}, {"remove": False}, "x"):
        assert post(address, "/api/change/a-good", body) == 400, body
    assert (runs / "a-good").is_dir()
    (runs / "a-good" / "logs").mkdir(exist_ok=True)
    (runs / "a-good" / "logs" / "x.log").symlink_to("/etc/hostname")
    assert get(f"{address}files/a-good/events.jsonl")[0] == 200
    assert get(f"{address}files/tune-x/study.html")[0] == 200
    assert get(f"{address}files/tune-x/trials/0001")[0] == 307, "a trial's folder leads to its run"
    outside = ("a-good/../b-fair/run.json", "a-good/%2e%2e/b-fair/run.json", "a-good/logs/x.log", "a-good", "")
    for path in (*outside, "tune-x/study.db", "a-good/logs/../../../x", "config/run.json"):
        assert get(f"{address}files/{path}")[0] == 404, path
        assert get(f"{address}api/log/{path}")[0] == 404, path


def test_a_page_in_a_runs_folder_has_no_rights_of_the_dashboard(page, address):
    page.open(f"{address}files/tune-x/study.html")
    assert page.wait("document.title !== 'charts' && document.title") == "null", "its origin is none"
