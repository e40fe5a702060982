"""What offload to NVMe needs is looked for before any rank starts, and a long compile is announced."""

from __future__ import annotations

import importlib.util
import os
import shutil
from types import SimpleNamespace

import pytest

from phalanx import DistributedConfig
from phalanx.engines.deepspeed.engine import check_nvme, slow_start
from phalanx.errors import UsageError

compiles = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")


@pytest.fixture
def build_folder(tmp_path, monkeypatch):
    """Where torch would build extensions, empty; and a DeepSpeed without any that were built at its installation."""
    package = SimpleNamespace(submodule_search_locations=[str(tmp_path / "deepspeed")])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: package)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    for name in ("CXX", "CFLAGS", "LDFLAGS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "built"


def offloading(path) -> DistributedConfig:
    return DistributedConfig(strategy="deepspeed", zero_stage=3, offload="nvme", nvme_path=path)


def test_a_folder_that_does_not_exist_is_refused(tmp_path, build_folder):
    with pytest.raises(UsageError, match=r"nvme_path = .*: there is no such folder\n.*mkdir -p"):
        check_nvme(offloading(tmp_path / "missing"))


def test_nothing_is_asked_of_runs_that_stay_in_memory(build_folder, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    check_nvme(DistributedConfig())
    assert slow_start(DistributedConfig()) is None


def test_a_missing_compiler_is_named(tmp_path, build_folder, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UsageError, match=r"no C\+\+ compiler\n.*libaio-dev"):
        check_nvme(offloading(tmp_path))


@compiles
def test_headers_are_tried_with_the_compiler_itself(tmp_path, build_folder, monkeypatch):
    """A libaio of our own, where CFLAGS and LDFLAGS say; then one whose header is broken."""
    header = tmp_path / "libaio.h"
    header.write_text("typedef int io_context_t;\nstatic inline int io_submit(int, long, void*) { return 0; }\n")
    (tmp_path / "libaio.so").write_text("")  # an empty linker script
    monkeypatch.setenv("CFLAGS", f"-I{tmp_path}")
    monkeypatch.setenv("LDFLAGS", f"-L{tmp_path}")
    check_nvme(offloading(tmp_path))
    header.write_text("#error broken\n")
    with pytest.raises(UsageError, match=r"libaio does not compile here\n.*apt install libaio-dev"):
        check_nvme(offloading(tmp_path))


def test_what_deepspeed_was_installed_with_needs_no_compiler(tmp_path, build_folder, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    built = tmp_path / "deepspeed" / "ops" / "aio"
    built.mkdir(parents=True)
    (built / "async_io_op.cpython-311.so").write_bytes(b"")
    check_nvme(offloading(tmp_path))
    assert slow_start(offloading(tmp_path)) is None


def test_a_long_compile_is_announced_once_it_is_needed(tmp_path, build_folder):
    assert "takes minutes" in slow_start(offloading(tmp_path))
    lock = build_folder / "pin_memory" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert f"delete the locks of a killed one, or it waits: {lock}" in slow_start(offloading(tmp_path))
    (build_folder / "async_io").mkdir()
    (build_folder / "async_io" / "async_io.so").touch()
    assert slow_start(offloading(tmp_path)) is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_refused(tmp_path, build_folder):
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    with pytest.raises(UsageError, match="not writable"):
        check_nvme(offloading(folder))
