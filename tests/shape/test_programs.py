"""Programs that the tests fork behave as in a fresh interpreter, and get one where imports would differ."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import programs
import psutil
import pytest
from command import ROOT, clean_environment, write_script
from waiting import LIMIT_SECONDS

IMPORTED = "import sys; print('torch' in sys.modules)"

SAID = """
import os, signal, sys, tempfile, threading, time
print(sys.argv, sys.orig_argv[1:], sys.path[:3], os.getcwd(), __name__, globals().get("__file__"))
print(os.environ.get("MINE"), os.environ.get("HOME"), tempfile.gettempdir(), time.tzname, os.getpid() == os.getpgid(0))
print(signal.getsignal(signal.SIGINT), threading.active_count(), sys.stdin.read())
for stream in (sys.stdin, sys.stdout, sys.stderr):
    print(stream.name, stream.encoding, stream.errors, stream.line_buffering, stream.isatty(), stream.fileno())
print(sorted(os.listdir("/proc/self/fd"))[:4], os.listdir("."), sys.modules["__main__"].__dict__ is globals())
"""

ENDS = {
    "well": "print('done')",
    "with a number": "import sys; sys.exit(300)",
    "with a text": "import sys; sys.exit('a reason')",
    "with an error": "def call():\n    raise ValueError('wrong')\ncall()",
    "by ctrl-c": "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "after its threads": "import threading, time\n"
    "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\nprint('main')",
    "with work to do at exit": "import atexit; atexit.register(print, 'at exit'); print('main', end='')",
}


def both(words: list[str], cwd: os.PathLike[str], **options: object) -> tuple[tuple[int, str, str], ...]:
    """Return how a program ended and what it wrote, forked and in a fresh interpreter."""
    options = {"env": clean_environment(), "input": "given", **options}
    command = [sys.executable, *words]
    done = [
        each(command, cwd=cwd, capture_output=True, text=True, **options) for each in (programs.run, subprocess.run)
    ]
    return tuple((each.returncode, each.stdout, each.stderr) for each in done)


@pytest.mark.parametrize(
    "words", [["said.py", "a b", ""], ["inner/said.py"], ["-m", "said", "--flag"], ["-m", "inner"], ["-c", SAID, "x"]]
)
def test_a_forked_program_sees_what_a_fresh_one_sees(tmp_path, words):
    write_script(tmp_path / "said.py", SAID)
    (tmp_path / "inner").mkdir()
    for name in ("said", "__main__", "__init__"):
        write_script(tmp_path / "inner" / f"{name}.py", "" if name == "__init__" else SAID)
    environment = clean_environment(MINE="1", TZ="Asia/Tokyo", TMPDIR=str(tmp_path), PYTHONPATH=f"{ROOT}:{tmp_path}")
    forked, fresh = both(words, tmp_path, env=environment, start_new_session=True)
    assert forked == fresh
    assert forked[0] == 0


@pytest.mark.parametrize("end", ENDS)
def test_a_forked_program_ends_as_a_fresh_one_does(tmp_path, end):
    write_script(tmp_path / "ends.py", ENDS[end])
    forked, fresh = both(["ends.py"], tmp_path)
    assert forked == fresh


def test_what_would_import_something_else_gets_a_fresh_interpreter(tmp_path):
    def has_torch(**environment: str) -> bool:
        words = [sys.executable, "-c", IMPORTED]
        done = programs.run(words, cwd=tmp_path, env=clean_environment(**environment), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout == "True\n"

    assert has_torch()
    assert not has_torch(PYTHONHASHSEED="1")
    assert not has_torch(TORCH_LOGS="")
    (tmp_path / "outside.py").touch()
    assert has_torch()
    (tmp_path / "numpy.py").touch()
    assert not has_torch()


def test_a_forked_program_is_a_child_with_a_session_and_gets_signals(tmp_path):
    code = "import os, sys, time; print(os.getppid(), os.getsid(0), flush=True); time.sleep(600)"
    with programs.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, env=clean_environment(), stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout.readline().split() == [str(os.getpid()), str(process.pid)]
            assert psutil.Process(process.pid).ppid() == os.getpid()
            assert programs.started_by(process) == []
            os.killpg(process.pid, signal.SIGTERM)
            assert process.wait(LIMIT_SECONDS) == -signal.SIGTERM
        finally:
            process.kill()
