"""What a run does about torch.compile: compiles parts of a model, counts and reports that, keeps the results.

One graph per model is worth its compilation: that of a whole training batch. Evaluation, and the smaller batches at the
end of an epoch, run the model as it is written.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, MutableMapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Event as Flag
from threading import Lock, Thread
from typing import Any

import torch
from torch import nn

from phalanx import torch_compat
from phalanx.host.files import make_private
from phalanx.model import CompileRegions, implements
from phalanx.observe.events import Event, Message, Phase
from phalanx.observe.format import duration
from phalanx.observe.step_clock import StepClock

_SAID_AFTER = 2.0
"""A step that has compiled for this many seconds gets a line, and another one after `_SAID_AGAIN` times as many."""
_SAID_AGAIN = 5
_LONGEST_REASON = 200


class CompileWatch:
    """Counts what torch.compile compiles in this process apart from training, and reports it.

    torch calls `_begin` and `_end` around each compilation, once for nested ones. That of a backward pass may run in a
    thread of autograd, which the step waits for.
    """

    def __init__(self, clock: StepClock, emit: Callable[[Event], None]) -> None:
        self._clock, self._emit = clock, emit
        self._lock = Lock()
        self._ended = Flag()
        self._first_step = self._graphs_before = 0
        self.seconds = self._began = self._step_began = 0.0
        """Seconds of all compilations so far, those in evaluations included."""
        self._forget_step()

    def _forget_step(self) -> None:
        self._compiles, self._of_step, self._say_at = False, 0.0, _SAID_AFTER

    def watch(self, first_step: int) -> Callable[[], None]:
        """Watch from now on, and return what ends it; `first_step`: steps before."""
        self._first_step = first_step
        self._graphs_before = torch_compat.compiled_graphs()
        return torch_compat.around_compiles(self._begin, self._end)

    @property
    def graphs(self) -> int:
        """How many graphs were made so far."""
        return torch_compat.compiled_graphs() - self._graphs_before

    def _begin(self) -> None:
        with self._lock:
            self._began, self._ended = self._clock.now, Flag()
            if not self._compiles:
                self._compiles, self._step_began = True, time.time()
                self._emit(Phase("compile", "begin"))
        Thread(target=self._say, args=(self._ended,), name="phalanx-compiles", daemon=True).start()

    def _end(self) -> None:
        with self._lock:  # after a message that is being sent
            self._ended.set()
            spent = self._clock.now - self._began
            self._clock.leave_out("compile", spent)
            self.seconds += spent
            self._of_step += spent

    def _say(self, ended: Flag) -> None:
        while not ended.wait(max(0.0, self._say_at - self._taken)):
            with self._lock:
                if ended.is_set():
                    return
                self._say_at *= _SAID_AGAIN
                step = f"step {self._first_step + self._clock.steps + 1}" if self._clock.steps else "first step"
                self._emit(Message("info", f"compiling the model ({step}): {self._taken:.0f} s so far"))

    @property
    def _taken(self) -> float:
        """Seconds of this step's compilations, while one is running."""
        return self._of_step + self._clock.now - self._began

    def step_done(self) -> None:
        """Report what was compiled up to the end of a step, if anything; after the first step also why."""
        if not self._compiles:
            return
        self._emit(Phase("compile", "end", self._of_step))
        if self._clock.steps > 1:
            reason = torch_compat.recompile_reason(self._step_began)[:_LONGEST_REASON]
            step = self._first_step + self._clock.steps
            text = f"step {step}: torch.compile compiled again for {duration(self._of_step)}"
            self._emit(Message("info", f"{text}: {reason}" if reason else text))
        self._forget_step()


def compile_parts(parts: list[nn.Module], device: torch.device, notes: list[str]) -> list[Callable[[], None]]:
    """Compile parts of a model in place, and return what undoes it; without what torch needs, say so and do nothing."""
    if device.type == "cuda" and not torch_compat.has_triton():
        notes.append("compile: Triton is not installed (pip install triton), so the model runs uncompiled")
        return []
    return [compile_in_place(part) for part in parts]


def compile_in_place(model: nn.Module) -> Callable[[], None]:
    """Compile the calls of the user's own model, inside its wrapper; return what undoes it.

    Not the wrapper: torch would compile the insides of DDP, dozens of frames and more with every step, whereas of a
    model inside DDP it makes one graph and cuts that by DDP's buckets.
    """
    if implements(model, CompileRegions):
        regions = [(module, name, vars(module).get(name)) for module, name in model.compile_regions()]
        for module, name, _ in regions:  # in the instance; hooks of fsdp around the module stay as written
            setattr(module, name, torch.compile(getattr(module, name), dynamic=False))
        return partial(_uncompile, regions)
    inner = torch_compat.uncompiled_call(model)

    def call(*arguments: Any, **options: Any) -> Any:  # a plain function: torch skips the calls of its own modules
        return inner(*arguments, **options)

    torch_compat.set_compiled_call(model, torch.compile(call))

    return partial(torch_compat.set_compiled_call, model, None)


def _uncompile(regions: list[tuple[nn.Module, str, Any]]) -> None:
    for module, name, before in regions:
        if before is None:
            delattr(module, name)
        else:
            setattr(module, name, before)


class CompiledCalls:
    """Switches all compiled models of this process between their graphs and the code as it is written."""

    def __init__(self, notes: list[str]) -> None:
        """Keep compiled code until `end`; `notes` gets a message where that is not possible."""
        self._eager: ExitStack | None = None
        self._before = {name: os.environ.get(name) for name in (_INDUCTOR, _TRITON)}
        notes += [note for note in [keep_compiled_code()] if note]

    def use(self, *, compiled: bool) -> None:
        """Let calls from now on run compiled, or as written; a call that changes nothing costs nothing."""
        if compiled is (self._eager is None):
            return
        if self._eager is not None:
            self._eager.close()
            self._eager = None
        else:
            self._eager = ExitStack()
            self._eager.enter_context(torch.compiler.set_stance("force_eager"))

    def end(self) -> None:
        """Let calls run compiled again, and code that is compiled later be kept where it was before."""
        self.use(compiled=True)
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_INDUCTOR, _TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"


def keep_compiled_code(environ: MutableMapping[str, str] = os.environ) -> str:
    """Let torch keep compiled code where the next run finds it, unless the user has chosen a place; return a note.

    torch reads these variables at each compilation; its own place, in the temporary folder, may be in them already.
    """
    directory = environ.get(_INDUCTOR)
    if directory is not None and directory != torch_compat.default_compile_cache():
        return ""
    try:
        folder = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "phalanx" / "compile"
        make_private(folder)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} is not writable")
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        return f"compiled code is not kept for the next run: {error}. {_INDUCTOR} can name a folder for it."
    environ[_INDUCTOR] = str(folder)
    environ.setdefault(_TRITON, str(folder / "triton"))
    return ""
