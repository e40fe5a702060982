"""The engine `deepspeed`: what offload to NVMe needs: a folder, libaio, minutes to compile its reader.

No torch here.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from phalanx.config import DistributedConfig
from phalanx.config.settings import Settings
from phalanx.engine import Engine
from phalanx.engines.deepspeed.rules import batch_size_for, nvme_path
from phalanx.errors import UsageError

_EXTENSIONS = ("pin_memory", "async_io")
"""What DeepSpeed compiles for NVMe, in its order."""
_PROGRAM = "#include <libaio.h>\nint main() { io_context_t context = 0; return io_submit(context, 0, 0); }\n"
_COMPILE_LIMIT = 60.0


def check_nvme(config: DistributedConfig) -> None:
    """Raise for offload='nvme' where its folder, the compiler or libaio is missing."""
    path = nvme_path(config)
    if config.offload != "nvme" or path is None:
        return
    folder = Path(path)
    if not folder.is_dir():
        raise UsageError(f"nvme_path = {path!r}: there is no such folder", hint=f"Create it: mkdir -p {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"nvme_path = {path!r}: not writable", hint="Give a folder you may write to.")
    if not _installed("async_io"):  # DeepSpeed looks for libaio also where it finds what it compiled before
        _check_compiler()


def slow_start(config: DistributedConfig) -> str | None:
    """Return a notice for the user where the ranks will first compile for minutes, else None."""
    if config.offload != "nvme" or _installed("async_io") or _built("async_io", "async_io.so"):
        return None
    text = "DeepSpeed compiles its reader of NVMe first, which takes minutes, once for this machine"
    locks = [str(lock) for name in _EXTENSIONS for lock in _built(name, "lock")]
    if locks:  # torch waits for a lock for ever, also for that of a killed process
        text += f"; if no other run is compiling, delete the locks of a killed one, or it waits: {' '.join(locks)}"
    return text


def _check_compiler() -> None:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        raise UsageError(
            "offload = 'nvme' makes DeepSpeed compile its reader, and there is no C++ compiler",
            hint="Install one: apt install g++ libaio-dev (dnf install gcc-c++ libaio-devel).",
        )
    flags = [shlex.split(os.environ.get(name, "")) for name in ("CFLAGS", "LDFLAGS")]
    words = [compiler, *flags[0], "-x", "c++", "-", "-o", os.devnull, *flags[1], "-laio"]
    tried = subprocess.run(words, input=_PROGRAM, capture_output=True, text=True, timeout=_COMPILE_LIMIT, check=False)
    if tried.returncode != 0:
        raise UsageError(
            "offload = 'nvme' makes DeepSpeed compile its reader, and a program with libaio does not compile here",
            hint="Install libaio's headers: apt install libaio-dev (dnf install libaio-devel); or give their path "
            "by CFLAGS=-I... and LDFLAGS=-L...",
        )


def _installed(name: str) -> list[Path]:
    """Return the extension that was installed together with DeepSpeed, if any."""
    package = importlib.util.find_spec("deepspeed")
    folders = (package.submodule_search_locations or []) if package is not None else []
    return [path for folder in folders for path in Path(folder).glob(f"ops/*/{name}_op*.so")]


def _built(name: str, file: str) -> list[Path]:
    """Return this file of an extension in the folder where torch builds them."""
    directory = os.environ.get("TORCH_EXTENSIONS_DIR")
    if directory is not None:
        return list(Path(directory).glob(f"{name}/{file}"))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return list(cache.glob(f"torch_extensions/{python}*/{name}/{file}"))


class DeepSpeed(Engine):
    """Checks what offload to NVMe needs; the rest is in the strategy."""

    strategy = "deepspeed"

    def check(self, config: DistributedConfig) -> None:
        """Check the folder and the compiler of `offload="nvme"`."""
        check_nvme(config)

    def check_batch(self, config: Settings, data_ranks: int) -> None:
        """Check the JSON's train_batch_size against the ranks."""
        batch_size_for(config, data_ranks)

    def notice(self, config: DistributedConfig) -> str | None:
        """Announce a compilation that takes minutes."""
        return slow_start(config)


ENGINE = DeepSpeed()
