"""A stranger's afternoon: the README, an own table, own images, a killed rank, the dashboard, a plan and a cluster.

Every command is a line of the documentation, which `documented` looks up before it runs it.
"""

from __future__ import annotations

import contextlib
import csv
import json
import random
import re
import runpy
import shlex
import time
import urllib.request
from pathlib import Path

import psutil
import pytest
from command import ROOT, Answer, end, finish, phalanx, start
from waiting import LIMIT_SECONDS

README = (ROOT / "README.md").read_text()


def documented(command: str, page: str, added: str = "") -> Answer:
    """Run a line that a page shows, with words added, and expect that it ends well."""
    text = (ROOT / page).read_text()
    assert re.search(rf"(?:^|[`$] ?){re.escape(command)}", text, re.MULTILINE), f"{page} does not say {command!r}"
    program, *words = shlex.split(command)
    assert program == "phalanx"
    answer = phalanx(*words, *shlex.split(added))
    assert answer.code == 0, f"{command}\n{answer.text}"
    return answer


def draw_images(folder: Path, count: int) -> None:
    """Write small red and blue pictures, one folder per class."""
    from PIL import Image

    drawn = random.Random(0)
    for name, colour in (("blue", (20, 40, 220)), ("red", (220, 40, 20))):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            shade = tuple(part + drawn.randrange(-15, 15) for part in colour)
            Image.new("RGB", (40, 30), shade).save(folder / name / f"{number}.jpg")


@pytest.fixture
def desk(tmp_path, monkeypatch, fork_server):
    """An empty folder, on a machine without GPUs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PHALANX_DEVICE", "cpu")
    return tmp_path


def test_the_readme(desk, capfd):
    answer = documented("phalanx train digits", "README.md", "--epochs 1 --num-workers 2")
    assert "accuracy" in answer.text
    found = re.search(r'```python title="first_fit.py"\n(.*?)```', README, re.DOTALL)
    assert found is not None
    (desk / "first_fit.py").write_text(found[1])
    names = runpy.run_path("first_fit.py", run_name="__main__")
    assert names["trainer"].history.best_accuracy > 0.85
    assert "'accuracy'" in capfd.readouterr().out


def test_a_table_of_your_own(desk):
    drawn = random.Random(0)
    with open("rows.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("width", "height", "city", "label"))
        for _ in range(200):
            width, height = drawn.random(), drawn.random()
            rows.writerow((width, height, "Oslo", "wide" if width > height else "tall"))
    Path("new.csv").write_text("height,width,city\n0.1,0.9,Rome\n0.9,0.1,Oslo\n")

    command = "phalanx train --model mlp --data ./rows.csv --set data.target=label"
    trained = documented(command, "docs/recipes.md", "--batch-size 16 --epochs 10 --learning-rate 0.02")
    assert "city" in trained.text, "a column that is left out is named"
    assert "accuracy" in documented("phalanx evaluate last", "docs/quickstart.md").text
    documented("phalanx predict last new.csv -o out.csv", "docs/runs.md")
    with open("out.csv", newline="") as file:
        assert [row["name"] for row in csv.DictReader(file)] == ["wide", "tall"]
    documented("phalanx export last", "docs/runs.md")
    assert list(Path().glob("*.safetensors"))


def test_images_of_your_own(desk):
    draw_images(Path("photos"), 30)
    command = "phalanx train imagefolder --data photos"
    documented(command, "docs/recipes.md", "--set data.size=32 --epochs 3 --learning-rate 0.01")
    Path("photos/red/0.jpg").rename("photo.jpg")
    answer = documented("phalanx predict last photo.jpg", "docs/runs.md", "--json")
    (row,) = json.loads(answer.out)["rows"]
    assert (row["file"], row["name"]) == ("photo.jpg", "red")


def test_a_rank_is_killed_and_the_dashboard_and_the_report_show_it(desk):
    process = start(
        *shlex.split("train digits --strategy fsdp --max-restarts 2 --num-workers 2 --epochs 200 --run-dir runs/kept"),
        cwd=desk,
        PHALANX_DEVICE="cpu",
    )
    try:
        rank = wait_for(lambda: rank_that_trains(desk / "runs/kept", 1))
        rank.kill()
        recovered = wait_for(lambda: events(desk / "runs/kept", "recovered"))
        assert recovered[0]["world_size"] == 2
        stopped = documented("phalanx runs stop last", "docs/runs.md")
        assert "kept" in stopped.text
        answer = finish(process)
    finally:
        end(process)
    assert answer.code == 75, answer.text
    assert "rank 1" in answer.text
    assert "2 attempts" in documented("phalanx report last", "docs/profiling.md").text

    documented("phalanx ui", "docs/runs.md", "last --save report.html")
    assert "kept" in Path("report.html").read_text()
    ui = start("ui", "--port", "0", cwd=desk)
    try:
        assert ui.stdout is not None
        address = ""
        while "http://" not in address:
            address = ui.stdout.readline()
            assert address, finish(ui).text
        with urllib.request.urlopen(re.search(r"http://\S+", address)[0], timeout=30) as page:  # type: ignore[index]
            assert "<title>" in page.read().decode()
    finally:
        end(ui)


def wait_for(look, seconds: float = LIMIT_SECONDS):
    """Return the first thing that is found."""
    until = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < until
        time.sleep(0.05)
    return found


def events(run: Path, kind: str) -> list[dict]:
    """Return the run's events of a kind."""
    path = run / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = []
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):  # a line that is being written
            found.append(json.loads(line))
    return [event for event in found if event["event"] == kind]


def rank_that_trains(run: Path, rank: int) -> psutil.Process | None:
    """Return the process of a rank, once steps were reported."""
    path = run / "logs" / f"rank-{rank}.process.json"
    if not events(run, "step") or not path.exists():
        return None
    return psutil.Process(json.loads(path.read_text())["pid"])


def test_a_failed_script_names_its_cause_afterwards_too(desk):
    """The rank that waited for the guilty one raises later, and its error is not the run's."""
    (desk / "train.py").write_text(
        "import torch.distributed as dist\n\ndist.init_process_group('gloo')\n"
        "if dist.get_rank() == 1:\n    raise ValueError('bad batch')\ndist.barrier()\n"
    )
    answer = phalanx("train", "--script", "train.py", "--num-workers", 2)
    assert answer.code == 1
    assert "rank 1" in answer.text.splitlines()[0]
    shown = documented("phalanx runs show last", "docs/troubleshooting.md").text
    assert re.search(r"^error +rank 1 .*ValueError: bad batch$", shown, re.MULTILINE), shown


def test_a_plan_and_a_cluster(desk):
    plan = documented("phalanx plan llama-7b --gpus 8 --gpu h100", "docs/how-to.md")
    assert "memory per GPU" in plan.text
    (desk / "train.py").write_text("import torch\n\nprint(torch.__version__)\n")
    command = "phalanx submit slurm --script train.py --num-nodes 2 --gpus-per-node 8"
    slurm = documented(command, "docs/how-to.md", "--render")
    assert "#SBATCH --nodes=2" in slurm.out
    assert "srun" in slurm.out
