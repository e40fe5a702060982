"""The pages of `phalanx ui` in real Chromium: the table of runs, one run, comparisons, searches, and changes."""

from __future__ import annotations

import http.client
import json
import sqlite3

import pytest
from browser import browser
from test_ui import append, get, served, started, step

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
        record(folder / name, started=begin, recipe={"name": "digits" if place < 2 else "gpt"})
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
    assert page.run("document.querySelector('.runs .best').innerText") in ("0.2", "50"), "the best value is marked"
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
    page.wait("document.getElementById('body').innerText.includes('5.0 GiB')")
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

    answer("add-tag", "<b>mine</b>")
    page.wait("document.querySelector('#question p.bad')?.innerText.includes('cannot be a tag')")
    page.run("document.getElementById('question').close()")
    answer("add-tag", "<b onclick=x>mine")
    page.wait("document.querySelector('.marks .tag')?.innerText.includes('<b onclick=x>mine')")
    answer("edit-note", MARKUP)
    page.wait("document.querySelector('.note')?.innerText === '" + MARKUP + "'")
    kept = json.loads((runs / "spare" / "run.json").read_text())
    assert (kept["tags"], kept["note"]) == (["<b onclick=x>mine"], MARKUP)
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
    connection = http.client.HTTPConnection(name, timeout=20)
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
