"""`phalanx ui` as a user starts it: in real Chromium, over HTTP, and as one file."""

from __future__ import annotations

import http.client
import json
import os
import pty
import shutil
import signal
import socket
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from browser import browser
from command import COMMAND, phalanx, start
from long_proofs import ALL
from packages import hide
from waiting import LIMIT_SECONDS, until

from phalanx.observe.events import Failure, MetricsReported, RanksReported, RunEnded, RunStarted, SampleDrawn, StepDone

WIDTHS = (1280, 390)
MANY, POINTS = (20 if ALL else 5), 100_000


@pytest.fixture(scope="module")
def page():
    with browser() as found:
        found.resize(1280)
        yield found


@contextmanager
def served(*words, cwd):
    """Run `phalanx ui` on a port that the system chooses, and give its address."""
    process = start("ui", "--no-browser", "--port", 0, *words, cwd=cwd)
    try:
        line = process.stdout.readline()
        assert "http://" in line, process.communicate(timeout=120)
        yield "http://" + line.strip().split("http://")[1]
    finally:
        process.terminate()
        process.communicate(timeout=120)


def started(name: str = "x", **more) -> RunStarted:
    sizes = {"parameters": 1, "batch_size": 1, "accumulation": 1, "global_batch": 2, "world_size": 2}
    texts = {"name": name, "run_dir": name, "device": "cpu", "strategy": "ddp", "precision": "fp32"}
    return RunStarted(**texts, **sizes, total_steps=100, rank=0, **{"time": 1000.0, **more})


def step(number: int, loss: float) -> StepDone:
    return StepDone(step=number, epoch=1, loss=loss, learning_rate=0.1, time=1000.0 + number, rank=0)


def append(folder: Path, *events) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "events.jsonl").open("a") as file:
        file.writelines(each if isinstance(each, str) else each.to_json() + "\n" for each in events)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a run that goes on, one that failed, and one whose name is markup."""
    folder = tmp_path_factory.mktemp("ui") / "runs"
    gauges = {"step_seconds": [0.1, 0.2]}
    ranks = RanksReported(
        step=5, ranks=[0, 1], values=gauges, percentiles={"step_seconds": [0.1] * 5}, slowest=1, time=1006.0
    )
    val = MetricsReported(step=5, epoch=1, split="val", values={"accuracy": 0.75}, time=1006.0)
    append(folder / "first", started(), *(step(number, 2.0 / number) for number in range(1, 6)), ranks, val)
    half_of_a_pair = "\ud83d"  # of surrogates, which UTF-8 cannot hold
    append(folder / "first", SampleDrawn(step=5, text=f"once <b>upon</b> {half_of_a_pair}", time=1006.5))
    failed = RunEnded(status="failed", step=2, total_time=2.0, throughput=1.0, reason="rank 1 raised", time=1003.0)
    lost = Failure(rank=1, host="h", step=2, error="ValueError", message="bad <b>sample</b>", time=1002.5)
    append(folder / "second", started(time=900.0), step(1, 2.0), step(2, float("nan")), lost, "half a li\n", failed)
    (folder / "second" / "logs").mkdir()
    error = {
        "rank": 1,
        "host": "h",
        "time": 1002.5,
        "step": 2,
        "type": "ValueError",
        "message": "bad",
        "traceback": ["Traceback"],
    }
    (folder / "second" / "logs" / "rank-1.error.json").write_text(json.dumps(error))
    append(folder / "<img src=x onerror=alert(1)>", started(time=800.0), step(1, 3.0))
    (folder / "config").mkdir()
    return folder


@pytest.fixture(scope="module")
def address(runs):
    with served(cwd=runs.parent) as found:
        yield found


def shown(page, tab: str) -> str:
    """Open a tab and return the text of the page."""
    page.run(f"delete document.body.dataset.drawn; openTab('{tab}')")
    page.wait("document.body.dataset.drawn")
    return page.run("document.body.innerText")


def test_every_view_shows_the_runs_without_errors(page, address):
    page.open(f"{address}#page=compare&runs=*")
    page.wait("document.body.dataset.drawn")
    assert "first" in page.run("document.getElementById('head').innerText")
    assert shown(page, "curves").count("train/loss") == 1
    assert "second: 1 value is not finite, the first at step 2" in page.run("document.body.innerText")
    assert "rank 1" in shown(page, "ranks")
    assert "Timeline" in shown(page, "time")
    text = shown(page, "events")
    assert "rank 1 on h, step 2: ValueError: bad <b>sample</b>" in text
    assert "undefined" not in text
    assert "1 line of events.jsonl cannot be read" in text
    assert "of 8 differ" in shown(page, "config")
    assert "No checkpoint" in shown(page, "checkpoints")
    assert "once <b>upon</b>" in shown(page, "samples")
    assert page.run("document.querySelectorAll('img').length") == 0, "a name was taken as markup"
    assert page.problems == []


@pytest.mark.parametrize("width", WIDTHS)
def test_no_view_scrolls_sideways(page, address, width):
    page.resize(width)
    try:
        for place in ("page=runs&runs=first", "page=compare&runs=*", "page=run&run=second"):
            page.open(f"{address}#{place}")
            page.wait("document.body.dataset.drawn")
            for tab in page.run("tabs()"):
                shown(page, tab)
                assert page.run("document.documentElement.scrollWidth <= innerWidth"), (place, tab)
            assert page.run("document.documentElement.scrollWidth <= innerWidth"), place
    finally:
        page.resize(1280)


def test_a_run_that_goes_on_is_followed(page, address, runs):
    page.open(f"{address}#page=run&run=first&tab=curves")
    page.wait("document.body.dataset.drawn")
    page.wait("document.getElementById('link').innerText === 'live'")
    half = step(6, 0.125).to_json() + "\n"
    append(runs / "first", half[:40])
    append(runs / "first", half[40:])
    page.wait("document.querySelector('[aria-label=\"train/loss\"] .last').innerText === '0.125'")
    page.wait("document.getElementById('head').innerText.includes('6 of 100')")
    page.run("location.hash = '#page=runs'")
    append(runs / "late", started(time=2000.0), step(1, 1.0))
    page.wait("document.getElementById('body').innerText.includes('late')")
    shutil.rmtree(runs / "late")
    page.wait("!document.getElementById('body').innerText.includes('late')")
    assert page.problems == []


def press(page, key: str) -> None:
    for kind in ("keyDown", "keyUp"):
        page.send("Input.dispatchKeyEvent", type=kind, key=key, code=key)


def test_the_page_is_usable_by_keyboard(page, address):
    page.open(f"{address}#page=run&run=first&tab=curves")
    page.wait("document.body.dataset.drawn")
    page.run("document.getElementById('tab-curves').focus()")
    press(page, "ArrowRight")
    assert page.wait("document.activeElement.id") == "tab-system"
    press(page, "Escape")
    page.wait("state.page === 'runs' && document.querySelectorAll('.runs tr[id]').length === 3")
    press(page, "/")
    assert page.wait("document.activeElement.id === 'filter'")
    press(page, "Escape")
    page.wait("document.activeElement.id !== 'filter'")
    press(page, "j")
    press(page, "j")
    second = page.wait("document.querySelectorAll('.runs tr[id]')[1].classList.contains('at') && state.cursor")
    press(page, "x")
    page.wait("state.selected.size === 1 && document.querySelector('.runs tr[id]').classList.contains('at')")
    press(page, "Enter")
    assert page.wait("state.page === 'run' && state.run") == second
    press(page, "?")
    page.wait("document.getElementById('keys').open")
    press(page, "Escape")
    page.run("history.back()")
    page.wait("state.page === 'runs'")
    assert page.problems == []


def test_many_long_runs_are_drawn_by_a_few_points_of_each(page, tmp_path):
    lines = (
        f'{{"event":"step","time":{1000 + number},"step":{number},"epoch":1,"loss":{number * 7919 % 1000 / 1000},'
        f'"learning_rate":{number % 97}}}\n'
        for number in range(1, POINTS + 1)
    )
    append(tmp_path / "runs" / "long-00", started(), *lines)
    for number in range(1, MANY):
        (tmp_path / "runs" / f"long-{number:02d}").mkdir()
        os.link(tmp_path / "runs/long-00/events.jsonl", tmp_path / f"runs/long-{number:02d}/events.jsonl")
    with served(cwd=tmp_path) as address:
        page.open(f"{address}#page=compare&runs=*")
        page.wait("document.body.dataset.drawn")
        assert page.run("[...cache.curves.values()].some(entry => entry.preview)"), "the first look reads few lines"
        page.wait("[...cache.curves.values()].every(entry => entry.preview === false)")  # the server has read them
        page.run("delete document.body.dataset.drawn; cache.curves.clear(); openTab('curves')")
        page.wait("document.body.dataset.drawn")
        drawn = page.run("[...charts.values()].map(chart => chart.plot.data[0].length)")
        assert max(drawn) < POINTS / 20, drawn  # it takes under a second for this reason
        assert page.run("[...charts.values()].map(chart => chart.plot.series.length - 1)") == [2 * MANY] * 2, (
            "values and their mean"
        )
        assert page.run("document.querySelectorAll('[aria-label=\"train/loss\"] li').length") == MANY
        peaks = "Math.max(...charts.get('train/loss').plot.data[1].filter(value => value !== null)).toFixed(3)"
        assert page.run(peaks) == "0.999"
        page.leave()
    assert page.problems == []


def test_a_file_of_its_own_shows_the_runs_without_a_network(page, runs, tmp_path, monkeypatch):
    monkeypatch.chdir(runs.parent)
    answer = phalanx("ui", "first", "second", "--save", tmp_path / "report.html")
    assert (answer.code, answer.out.strip()) == (0, str(tmp_path / "report.html"))
    page.open(f"file://{tmp_path}/report.html")
    page.wait("document.body.dataset.drawn")
    assert page.run("charts.size") > 2
    text = page.run("document.body.innerText")
    assert "second" in text
    assert "it does not change" in text
    page.run("openTab('events')")
    page.wait("document.body.innerText.includes('bad <b>sample</b>')")
    page.run("location.hash = '#page=run&run=' + encodeURIComponent([...state.runs.keys()][0])")
    page.wait("document.getElementById('body').innerText.includes('Environment')")
    assert page.run("performance.getEntriesByType('resource').length") == 0
    assert page.problems == []


def get(address: str, host: str | None = None, cookie: str = "") -> tuple[int, str, str]:
    """Return the status, the text and the cookie of an answer; redirections are not followed."""
    place = address.removeprefix("http://")
    name, _, path = place.partition("/")
    connection = http.client.HTTPConnection(name, timeout=LIMIT_SECONDS)
    try:
        headers = {"Cookie": cookie} | ({"Host": host} if host else {})
        connection.request("GET", f"/{path}", headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.getheader("Set-Cookie") or ""
    finally:
        connection.close()


def test_requests_outside_the_folder_and_under_foreign_names_are_refused(address, runs):
    assert get(address)[0] == 200
    assert get(address, host="localhost:1")[0] == get(address, host="[::1]:7007")[0] == 200
    for name in ("evil.example", "evil.example:80", "", "localhost.evil.example"):
        assert get(address, host=name or " ")[0] == 421, name
    for path in ("..", "%2e%2e", "../first", "%2e%2e%2fruns%2ffirst", "config", "missing", "first%00"):
        assert get(f"{address}api/run/{path}")[0] == 404, path
    for path in ("../server.py", "%2e%2e/server.py", "..%2f..%2f__init__.py"):
        assert get(f"{address}static/{path}")[0] == 404, path
    assert get(f"{address}api/curves/first?width=x")[0] == get(f"{address}api/curves/first?from=nan")[0] == 400
    assert get(f"{address}api/curves/first?width=999999999")[0] == 200


def test_other_addresses_need_the_token(page, runs):
    with served("--host", "0.0.0.0", cwd=runs.parent) as printed:
        port, token = printed.split(":")[2].split("/?token=")
        base = f"http://127.0.0.1:{port}/"
        assert len(token) >= 32
        for path in ("", "api/runs", "static/app.js", "?token=", f"?token={token[:-1]}"):
            assert get(base + path)[0] == 401, path
        status, _, cookie = get(f"{base}?token={token}")
        assert status == 303
        assert "HttpOnly" in cookie
        assert get(f"{base}api/runs", cookie=cookie.split(";")[0])[0] == 200
        assert get(f"{base}?token={token}", host="evil.example")[0] == 421
        page.open(f"{base}?token={token}")
        page.wait("document.body.dataset.drawn")
        assert "token" not in page.run("location.href")
        page.leave()
    assert page.problems == []


def test_no_command_line_has_the_token(tmp_path):
    """The browser gets a file that leads to the address: all users of a machine can read its command line."""
    (tmp_path / "runs").mkdir()
    seen = tmp_path / "seen"
    browser = tmp_path / "xdg-open"
    browser.write_text(f'#!/bin/sh\necho "$1" > {seen}.new\nmv {seen}.new {seen}\n')
    browser.chmod(0o755)
    pid, end = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.environ.update(DISPLAY=":0", BROWSER=str(browser), TMPDIR=str(tmp_path))
        os.execv(sys.executable, [*COMMAND, "ui", "--token", "--port", "0"])
    try:
        until(seen.exists)
        opened = Path(seen.read_text().strip().removeprefix("file://"))
        assert opened.parent.stat().st_mode & 0o077 == 0, "open to this user alone"
        address = opened.read_text().partition("url=")[2].partition('"')[0]
        assert get(address)[0] == 303
        os.kill(pid, signal.SIGINT)
        assert os.waitpid(pid, 0)[1] == 0
        pid = 0
        assert not opened.exists()
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(end)


def test_two_dashboards_read_one_folder_and_a_port_in_use_is_said(runs, address):
    with served(cwd=runs.parent) as second:
        assert json.loads(get(f"{second}api/runs")[1]) == json.loads(get(f"{address}api/runs")[1])
    port = address.split(":")[2].strip("/")
    answer = phalanx("ui", "--no-browser", "--port", port, "--runs-dir", runs)
    assert answer.code == 2
    assert f"port {port} of 127.0.0.1 is in use" in answer.err
    free = int(answer.err.split("--port ")[1].split(",")[0])
    with socket.create_server(("127.0.0.1", free)):
        pass
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        answer = phalanx("ui", "--no-browser", "--host", "::1", "--port", taken.getsockname()[1], "--runs-dir", runs)
    assert "of ::1 is in use" in answer.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--runs-dir", "missing"], "there is no such folder"),
        (["--runs-dir", __file__], "is a file, not a folder"),
        (["--port", "70000"], "not between 0 and 65535"),
        (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1"),
        (["--host", "no such host"], "cannot listen on no such host"),
        (["--prot", "1"], "Did you mean --port?"),
    ],
)
def test_wrong_arguments_are_explained(words, said):
    answer = phalanx("ui", "--no-browser", *words)
    assert answer.code == 2
    assert said in answer.err


def test_a_missing_package_is_named(monkeypatch):
    hide(monkeypatch, "starlette", "phalanx.tools.ui.server")
    answer = phalanx("ui", "--no-browser")
    assert (answer.code, "pip install 'phalanx[monitor]'" in answer.err) == (2, True)
    assert "the dashboard needs starlette, which" in answer.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["first", "second"], "phalanx ui last --save report.html"),
        (["first", "--save", "."], "is a folder"),
        (["first", "--save", "missing/report.html"], "there is no folder missing"),
        (["config", "--save", "x.html"], "is not the folder of a run"),
    ],
)
def test_wrong_reports_are_explained(runs, monkeypatch, words, said):
    monkeypatch.chdir(runs.parent)
    monkeypatch.chdir(runs)
    answer = phalanx("ui", *words, "--runs-dir", runs)
    assert answer.code == 2
    assert said in answer.err


def test_a_folder_without_runs_says_how_to_begin(page, tmp_path):
    with served(cwd=tmp_path) as address:
        page.open(address)
        page.wait("document.body.innerText.includes('phalanx train digits')")
        page.leave()
    assert page.problems == []
