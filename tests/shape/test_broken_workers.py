"""What `make test` reports when a worker of pytest breaks off."""

from __future__ import annotations

import subprocess
import sys

from command import ROOT, clean_environment, write_script

BREAKS = """
    import pytest

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(item, call):
        if item.name == "test_cannot_be_formatted" and call.when == "call":
            raise SystemError("AST constructor recursion depth mismatch (before=90, after=64)")
"""
TESTS = """
    import os, signal

    def test_fails():
        assert 1 + 1 == 3

    def test_cannot_be_formatted():
        pass

    def test_interrupts_its_worker():
        os.kill(os.getpid(), signal.SIGINT)

    def test_passes():
        pass
"""


def test_what_breaks_a_worker_is_a_failure_and_the_other_tests_run(tmp_path):
    write_script(tmp_path / "conftest.py", BREAKS)
    write_script(tmp_path / "test_some.py", TESTS)
    words = ["-p", "broken_workers", "-p", "no:cacheprovider", "-n", "1", "-rf", "--basetemp=own"]
    environment = clean_environment(PYTHONPATH=str(ROOT / "tests/helpers"))
    command = [sys.executable, "-m", "pytest", *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "3 failed, 1 passed" in done.stdout, done.stdout
    assert "crashed while running 'test_some.py::test_cannot_be_formatted'" in done.stdout
    assert "crashed while running 'test_some.py::test_interrupts_its_worker'" in done.stdout
    assert "depth mismatch" in done.stderr
    assert "KeyboardInterrupt at " in done.stderr
