"""Install a built wheel in an empty environment and use it as a new user does: `make dist` calls it.

`python tools/try_wheel.py WHEEL [pip arguments for torch]`. The environment has what pip installs for the wheel and
nothing else, the current folder is empty, and the clone is not on the path.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = {
    "--version": "phalanx ",
    "train digits --epochs 1 --num-workers 2 --name first": "finished",
    "runs": "first",
    "evaluate last": "accuracy",
    "ui first --save first.html": "first.html",
    "plan gpt2 --gpus 8 --gpu a100": "phalanx train",
    "learn list": "phase",
    "init my-net": "recipe.toml",
}
"""What is typed, and what its answer contains: together they need every kind of file that a wheel must contain."""


def use(python: Path | str, folder: Path, environment: dict[str, str]) -> None:
    """Type the commands in a folder; the first that does not answer as expected ends it."""
    for arguments, expected in COMMANDS.items():
        command = [str(python), "-P", "-m", "phalanx", *arguments.split()]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
        if done.returncode or expected not in done.stdout + done.stderr:
            sys.exit(
                f"phalanx {arguments}: exit code {done.returncode}, expected {expected!r}\n{done.stdout}{done.stderr}"
            )
        print(f"phalanx {arguments}: as expected", flush=True)


def main() -> None:
    """Make the environment, install, use."""
    wheel, torch_arguments = Path(sys.argv[1]).resolve(), sys.argv[2:]
    with tempfile.TemporaryDirectory(prefix="phalanx-wheel-") as made:
        folder = Path(made)
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        python = folder / "venv" / "bin" / "python"
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--constraint", ROOT / "constraints.txt", *torch_arguments, "torch"], check=True)
        subprocess.run([*pip, wheel], check=True)
        (folder / "empty").mkdir()
        use(python, folder / "empty", {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")})
    print(f"{wheel.name} works in an empty environment")


if __name__ == "__main__":
    main()
