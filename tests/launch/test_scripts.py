"""Scripts and modules run under the launcher as they run under Python and torchrun."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from ranks import RecordingConsole, run_script

from phalanx.errors import UsageError
from phalanx.launch import LaunchSpec, ModuleTarget, launch

ROOT = Path(__file__).resolve().parents[2]


def test_the_environment_is_torchruns(launch_script):
    source = """
    import json, os
    names = ("RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE"
             " ROLE_NAME MASTER_ADDR TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID"
             " TORCHELASTIC_USE_AGENT_STORE OMP_NUM_THREADS ADDED").split()
    print(" ".join(os.environ[name] for name in names))
    assert int(os.environ["MASTER_PORT"]) > 0 and os.environ["TORCHELASTIC_ERROR_FILE"]
    """
    run = launch_script(source, threads_per_rank=1, env={"ADDED": "yes"}, run_id="job7")
    assert run.console.lines == [(0, "0 0 2 2 0 1 0 2 default 127.0.0.1 0 0 job7 True 1 yes")]
    assert run.log(1).split()[:3] == ["1", "1", "2"]
    ids = {LaunchSpec(target=ModuleTarget("json"), ranks_per_node=1, log_dir=run.log_dir).run_id for _ in range(2)}
    assert len(ids) == 2, "a run without an id of the user's gets one of its own"


def test_the_console_shows_rank_zero_only_and_each_rank_has_a_log(launch_script):
    run = launch_script("import os\nprint('I am', os.environ['RANK'])\n", ranks_per_node=3)
    assert run.console.lines == [(0, "I am 0")]
    assert [run.log(rank) for rank in range(3)] == ["I am 0\n", "I am 1\n", "I am 2\n"]


def test_the_console_shows_all_ranks_on_request(launch_script):
    run = launch_script("import os\nprint('I am', os.environ['RANK'])\n", console_ranks="all")
    assert sorted(run.console.lines) == [(0, "I am 0"), (1, "I am 1")]
    assert run.log(1) == "I am 1\n"


def test_a_redrawn_line_reaches_the_console_while_it_is_drawn(launch_script):
    run = launch_script("print('10%', end='\\r')\nprint('100%')\nprint('rest', end='')\n", ranks_per_node=1)
    assert [line for _, line in run.console.lines] == ["10%\r", "100%", "rest"]


def test_a_script_is_the_main_program(launch_script, tmp_path):
    (tmp_path / "sibling.py").write_text("name = 'sibling'\n")
    source = """
    import dataclasses, pickle, sys
    import sibling
    @dataclasses.dataclass
    class Point:
        x: int
    assert pickle.loads(pickle.dumps(Point(3))) == Point(3)
    assert sys.modules["__main__"].Point is Point
    assert __name__ == "__main__" and __spec__ is None
    print(sibling.name, sys.argv, __file__, sys.path[0])
    """
    run = launch_script(source, args=("--lr", "1"), ranks_per_node=1)
    script = str(tmp_path / "train.py")
    assert run.result.failure is None, run.report
    assert run.console.text == f"sibling {[script, '--lr', '1']} {script} {tmp_path}"


def test_a_module_runs_like_python_dash_m(tmp_path, monkeypatch, fork_server):
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "helper.py").write_text("value = 7\n")
    (package / "__main__.py").write_text(
        "import sys\nfrom .helper import value\nprint(__name__, value, sys.argv[1:])\n"
    )
    monkeypatch.chdir(tmp_path)
    console = RecordingConsole()
    spec = LaunchSpec(target=ModuleTarget("pkg", ("a", "b")), ranks_per_node=1, log_dir=tmp_path / "logs")
    result = launch(spec, console)
    assert result.failure is None, result.failure
    assert console.text == "__main__ 7 ['a', 'b']"


def test_a_module_that_does_not_exist_is_named(tmp_path, fork_server):
    console = RecordingConsole()
    spec = LaunchSpec(target=ModuleTarget("no_such_module"), ranks_per_node=1, log_dir=tmp_path / "logs")
    with pytest.raises(UsageError, match="there is no module 'no_such_module'"):
        launch(spec, console)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_loader_workers_find_the_scripts_classes(launch_script, method):
    source = f"""
    import torch
    from torch.utils.data import DataLoader, Dataset
    class Squares(Dataset):
        def __len__(self): return 4
        def __getitem__(self, index): return index * index
    def main():
        loader = DataLoader(Squares(), num_workers=1, multiprocessing_context="{method}")
        print([int(item) for item in loader])
    if __name__ == "__main__":
        main()
    """
    run = launch_script(source, ranks_per_node=1)
    assert run.result.failure is None, run.report
    assert run.console.text == "[0, 1, 4, 9]"


def test_a_script_without_a_main_guard_trains_with_ddp(launch_script):
    source = """
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    weights = [torch.zeros(1, 2) for _ in range(2)]
    dist.all_gather(weights, model.module.weight.data)
    print(bool((weights[0] == weights[1]).all()))
    dist.destroy_process_group()
    """
    run = launch_script(source)
    assert run.result.failure is None, run.report
    assert run.console.text == "True"
    events = sorted((event["rank"], event["event"]) for event in run.console.events)
    assert events == [(0, "joined"), (0, "joining"), (1, "joined"), (1, "joining")]


@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [
        ("sys.exit()", 0, ""),
        ("sys.exit(0)", 0, ""),
        ("sys.exit('no')", 1, "no"),
        ("sys.exit(4)", 4, ""),
        ("1/0", 1, ""),
    ],
)
def test_a_script_ends_with_pythons_own_exit_code(launch_script, ending, code, words):
    run = launch_script(f"import sys\n{ending}\n", ranks_per_node=1)
    assert (run.result.exit_code, run.console.text) == (code, words)


def test_exit_handlers_and_threads_run_before_a_rank_leaves(launch_script):
    source = """
    import atexit, sys, threading
    atexit.register(lambda: print("at exit"))
    gate = threading.Event()
    threading.Thread(target=lambda: (gate.wait(), print("thread"))).start()
    threading.Timer(0.05, gate.set).start()
    sys.stdout.write("main ")
    """
    run = launch_script(source, ranks_per_node=1)
    assert run.console.text.split() == ["main", "thread", "at", "exit"]


def test_the_temporary_directory_and_time_zone_are_the_ranks_own(launch_script, tmp_path):
    source = "import tempfile, time\nprint(tempfile.gettempdir(), time.tzname[0])\n"
    run = launch_script(source, env={"TMPDIR": str(tmp_path), "TZ": "XYZ-3"}, ranks_per_node=1)
    assert run.console.text == f"{tmp_path} XYZ"


def test_a_large_environment_reaches_the_ranks(launch_script):
    run = launch_script(
        "import os\nprint(len(os.environ['LARGE']))\n", env={"LARGE": "x" * 1_000_000}, ranks_per_node=1
    )
    assert run.console.text == "1000000"


def test_two_launches_at_the_same_time(tmp_path, fork_server):
    source = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    print(int(total))
    """
    sizes = (2, 3)
    runs = _in_threads(
        *(lambda size=size: run_script(tmp_path / str(size), source, ranks_per_node=size) for size in sizes)
    )
    assert [run.result.exit_code for run in runs] == [0, 0]
    assert [run.console.text for run in runs] == ["2", "3"]


def _in_threads(*calls):
    results = [None] * len(calls)

    def keep(index):
        results[index] = calls[index]()

    threads = [threading.Thread(target=keep, args=[index]) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_the_launcher_itself_imports_no_torch():
    code = "import sys, phalanx.launch, phalanx.observe.heartbeat; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_files_next_to_the_package_do_not_shadow_the_standard_library(tmp_path):
    """As in site-packages, where old copies of standard modules may be installed."""
    written = shutil.ignore_patterns("__pycache__")  # by other tests, at this moment
    shutil.copytree(ROOT / "phalanx", tmp_path / "site" / "phalanx", ignore=written)
    (tmp_path / "site" / "selectors.py").write_text("raise ImportError('the wrong selectors')\n")
    (tmp_path / "train.py").write_text("import selectors, phalanx\nprint(phalanx.__file__)\n")
    code = f"""
import selectors, sys
sys.path.insert(0, {str(tmp_path / "site")!r})
import phalanx
del sys.path[0]
from phalanx.cli import main
sys.exit(main(["train", "--script", "train.py", "--device", "cpu"]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/site/phalanx/__init__.py\n"), done.stderr
