"""Try Phalanx with versions that its constraints do not pin: `make test-torch` and `make test-newest` call it.

`python tools/try_versions.py torch [VERSION ...]` installs each torch (without versions: the newest of the index and
the oldest that pyproject.toml allows) in an environment of its own, without constraints, and uses Phalanx there as a
new user does. `python tools/try_versions.py newest` installs the newest Ray, Optuna, transformers and Lightning beside
the pinned torch and runs their tests. Both end with rows for docs/tested.md and with exit code 1 if anything failed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
SNIPPET = re.findall(r'```python title="first_fit.py"\n(.*?)```', README, re.DOTALL)[0]
OWN_LOOP = """
import torch
from phalanx import Formation

f = Formation()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = f.prepare(
    model,
    optimizer,
    torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 4), torch.zeros(64, 1)), batch_size=8),
)
for inputs, targets in loader:
    loss = (model(inputs) - targets).square().mean()
    f.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
if f.rank == 0:
    print("trained on", f.world_size, "ranks")
"""
TORCH_CASES = {
    "`phalanx train digits`": ("-m phalanx train digits", "best accuracy"),
    "`first_fit.py`": ("first_fit.py", "accuracy"),
    "`Formation`": ("-m phalanx train --script own_loop.py --num-workers 2", "trained on 2 ranks"),
    "ddp": ("-m phalanx train digits --strategy ddp --epochs 1 --num-workers 2", "best accuracy"),
    "fsdp": ("-m phalanx train digits --strategy fsdp --epochs 1 --num-workers 2", "best accuracy"),
    "killed rank": ("-m phalanx verify digits --fault kill:rank=1,step=20 --num-workers 2 --epochs 1", "recovered"),
    "private names, shared memory": (
        f"-m pytest -q -p no:cacheprovider {ROOT}/tests/test_torch_compat.py {ROOT}/tests/comm/test_shared_memory.py",
        " passed",
    ),
}
"""What is typed after `python`, and what its answer contains."""
NEWEST = {
    "ray[default,train,tune]": "tests/engines/ray/test_ray.py tests/tools/tune/test_tune_ray.py",
    "optuna": "tests/tools/tune/test_tune.py tests/tools/tune/test_space.py",
    "transformers": "tests/zoo/models/test_hf.py tests/zoo/models/test_bert.py tests/zoo/models/test_t5.py "
    "tests/loop/test_model_calls.py tests/parity/test_hf_tensor_parity.py",
    "lightning": "tests/journeys/test_coming_from.py tests/journeys/test_newcomers.py",
}
"""Packages, and the tests that use them."""
TEST_PACKAGES = ("pytest", "pytest-timeout", "hypothesis", "psutil", "pyyaml")
SUSPECT = re.compile(r"\[W[ \d]|\w*Warning\b|deprecated")
"""Lines of a library that a user should not see at each start."""


def oldest_torch() -> str:
    """Return the oldest torch that pyproject.toml allows."""
    return re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[0] + ".0"


def environment(folder: Path, packages: list[str], *, newest: bool) -> Path:
    """Return the Python of an environment with these packages and Phalanx; one that is there is used again.

    `newest`: there may be newer versions than when it was made.
    """
    python, is_there = folder / "bin" / "python", (folder / "complete").exists()
    if not is_there:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    if not is_there or newest:
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *(["--upgrade"] if newest else []), *packages], check=True)
        subprocess.run([*pip, "--editable", ROOT, *TEST_PACKAGES], check=True)
        (folder / "complete").touch()
    return python


def version(python: Path, package: str) -> str:
    """Return the installed version of a package."""
    code = f"import importlib.metadata; print(importlib.metadata.version({package.partition('[')[0]!r}))"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def run(python: Path, folder: Path, arguments: str, expected: str) -> str:
    """Run one case and return "" if it answered as expected, else what it printed."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [python, *arguments.split()]
    try:
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=1800)
    except subprocess.TimeoutExpired as late:
        return f"not done after {late.timeout:.0f} s"
    output = done.stdout + done.stderr
    suspects = [] if "pytest" in arguments else [line for line in output.splitlines() if SUSPECT.search(line)]
    if done.returncode or expected not in output or suspects:
        return "\n".join([f"exit code {done.returncode}", *suspects, output[-3000:]])
    return ""


def try_torch(wanted: str, environments: Path) -> tuple[str, bool]:
    """Use Phalanx with one torch; return its row and whether all went well. `wanted`: a version, or "newest"."""
    newest = wanted == "newest"
    python = environment(environments / f"torch-{wanted}", ["torch" if newest else f"torch=={wanted}"], newest=newest)
    installed, folder = version(python, "torch"), environments / f"work-{wanted}-{time.time_ns()}"
    folder.mkdir()
    (folder / "first_fit.py").write_text(SNIPPET)
    (folder / "own_loop.py").write_text(OWN_LOOP)
    cells, good = [], True
    for name, (arguments, expected) in TORCH_CASES.items():
        began, problem = time.monotonic(), run(python, folder, arguments, expected)
        cells.append("fails" if problem else "yes")
        good = good and not problem
        verdict = f"FAILED\n{problem}" if problem else "as expected"
        print(f"torch {installed}, {name}: {verdict} ({time.monotonic() - began:.0f} s)", flush=True)
    return f"| {installed.partition('+')[0]} | {' | '.join(cells)} |", good


def try_newest(environments: Path) -> tuple[list[str], bool]:
    """Run the tests of each package with its newest version."""
    pinned = re.findall(r"^torch==.*", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    python = environment(environments / "newest", [*pinned, f"{ROOT}[test]", *NEWEST], newest=True)
    rows, good = [], True
    for package, tests in NEWEST.items():
        problem = run(python, ROOT, f"-m pytest -q -p no:cacheprovider {tests}", " passed")
        installed = version(python, package)
        print(f"{package} {installed}: {'FAILED' if problem else 'as expected'}\n{problem}", flush=True)
        rows.append(f"| {package.partition('[')[0]} | {installed} | {'fails' if problem else 'yes'} |")
        good = good and not problem
    return rows, good


def main() -> int:
    """Try what the command line names, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("torch", "newest"))
    parser.add_argument(
        "versions", nargs="*", metavar="VERSION", help="of torch: 2.13.0 [newest, and the oldest allowed]"
    )
    parser.add_argument(
        "--environments", type=Path, default=ROOT / ".venvs", metavar="DIR", help="where they are kept [.venvs]"
    )
    arguments = parser.parse_args()
    arguments.environments.mkdir(parents=True, exist_ok=True)
    environments = arguments.environments.resolve()
    if arguments.what == "newest":
        rows, good = try_newest(environments)
        head = ["package", "version", "its tests pass"]
    else:
        tried = [try_torch(each, environments) for each in arguments.versions or ("newest", oldest_torch())]
        rows, good = [row for row, _ in tried], all(well for _, well in tried)
        head = ["torch", *TORCH_CASES]
    print("\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *rows]))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
