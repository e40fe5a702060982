"""Hooks and callbacks: functions called every n steps, and objects with one method per event."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from phalanx.checkpoint.plain import to_json
from phalanx.errors import CheckpointError, UsageError
from phalanx.loop.step_info import StepInfo
from phalanx.observe.heartbeat import current as current_heartbeat
from phalanx.observe.heartbeat import within
from phalanx.observe.sinks import Sink

if TYPE_CHECKING:
    from phalanx.loop.running_trainer import RunningTrainer


class Callback:
    """Base class of callbacks: subclass it and override the hooks that you need. `trainer` is a `RunningTrainer`."""

    def state_dict(self) -> dict[str, Any] | None:
        """Return what must survive a resume or a lost rank, as plain values, equal on all ranks; None: nothing."""
        return None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned, before `on_fit_start`; also on a rank that replaces another."""

    def on_fit_start(self, trainer: RunningTrainer) -> None:
        """Before the first step."""

    def on_step_end(self, trainer: RunningTrainer, info: StepInfo) -> None:
        """After every optimizer step."""

    def on_epoch_end(self, trainer: RunningTrainer, epoch: int, metrics: dict[str, float]) -> None:
        """After every epoch and its evaluation."""

    def on_checkpoint(self, trainer: RunningTrainer, path: str) -> None:
        """After a checkpoint was published: some steps after it was begun, for it is written while training goes on."""

    def on_training_end(self, trainer: RunningTrainer) -> None:
        """After the last step and checkpoint, before the end of the run is reported."""

    def on_fit_end(self, trainer: RunningTrainer) -> None:
        """After the last step and evaluation."""


Hook = Callable[[StepInfo], None]
_HOOKS = "functions"
"""In `Hooks.called`: the functions that are called after a step."""


class Hooks:
    """The hooks and callbacks of one run."""

    def __init__(self, callbacks: list[Any] | None = None, trainer: RunningTrainer | None = None) -> None:
        """`trainer`: what the callbacks get."""
        self._trainer = trainer
        self._every: list[tuple[Hook, int]] = []
        self._callbacks: list[Callback] = []
        self._board = current_heartbeat()
        self.called: dict[str, int] = {}
        """How many callbacks were called after a step or an epoch whose others were not: a lost rank broke it off."""
        self.unreported: StepInfo | None = None
        """A step that was taken, and after which not all callbacks were called yet."""
        self.sinks: list[Sink] = []
        """Receivers of events that were given among the callbacks."""
        for item in callbacks or []:
            self.add(item)

    def add(self, item: Any, every: int = 1) -> None:
        """Add a `Callback`, a function of StepInfo, a (function, every) pair, or a sink of events."""
        if isinstance(item, type) and issubclass(item, Callback):
            name = item.__name__
            raise UsageError(f"{name} is the class, not a callback", hint=f"Write: callbacks=[{name}()]")
        if isinstance(item, Callback):
            self._callbacks.append(item)
        elif isinstance(item, Sink) and not isinstance(item, type):
            self.sinks.append(item)
        elif isinstance(item, tuple) and len(item) == 2 and callable(item[0]):
            self.add(*item)
        elif callable(item):
            if not isinstance(every, int) or every < 1:
                hint = "Write (function, every) with a whole number from 1 on."
                raise UsageError(f"a hook every {every!r} steps", hint=hint)
            self._every.append((item, every))
        else:
            raise UsageError(
                f"{item!r} is not a callback",
                hint="Give a phalanx Callback, a function of StepInfo, (function, every), or an object with the "
                "methods handle(event) and close().",
            )

    @property
    def wants_steps(self) -> bool:
        """Whether anything is called after steps."""
        return bool(self._every or self._callbacks)

    @property
    def has_users(self) -> bool:
        """Whether code of the user is called after steps."""
        packages = (type(callback).__module__.partition(".")[0] for callback in self._callbacks)
        return bool(self._every) or any(package != "phalanx" for package in packages)

    def after_step(self, info: StepInfo) -> None:
        """Call what is due after this step, and was not called for it yet."""
        before = self._board.enter("on_step_end")  # not `within`, which takes 10 times as long
        try:
            for number in range(self.called.get(_HOOKS, 0), len(self._every)):
                self.called[_HOOKS] = number
                hook, every = self._every[number]
                if info.step % every == 0:
                    hook(info)
            if self._every:
                self.called[_HOOKS] = len(self._every)
            self._fire_once("on_step_end", info)
        finally:
            self._board.enter(before)
        self.called.pop(_HOOKS, None)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the callbacks that have one, by position and class."""
        states = {f"{n}:{type(callback).__name__}": callback.state_dict() for n, callback in enumerate(self._callbacks)}
        return {name: state for name, state in states.items() if state is not None}

    def check_states(self) -> None:
        """Raise for a state that no checkpoint could hold, before anything is trained."""
        for callback in self._callbacks:
            try:
                to_json(callback.state_dict(), f"{type(callback).__name__}.state_dict()")
            except CheckpointError as error:
                raise UsageError(error.message, hint=error.hint) from None

    def load_state_dict(self, states: dict[str, Any], say: Callable[[str, str], None]) -> None:
        """Give each callback its state; `say`: reports states of callbacks that this run does not have."""
        callbacks = {f"{n}:{type(callback).__name__}": callback for n, callback in enumerate(self._callbacks)}
        for name, state in states.items():
            if name in callbacks:
                callbacks[name].load_state_dict(state)
            else:
                say(f"the checkpoint has the state of a callback, {name}, which this run does not have", "warning")

    def fire_once(self, moment: str, *arguments: Any) -> None:
        """Call one method of every callback, but of those that were called before a lost rank broke it off."""
        with within(moment, self._board):
            self._fire_once(moment, *arguments)

    def _fire_once(self, moment: str, *arguments: Any) -> None:
        for number in range(self.called.get(moment, 0), len(self._callbacks)):
            self.called[moment] = number
            getattr(self._callbacks[number], moment)(self._trainer, *arguments)
        self.called.pop(moment, None)

    def fire(self, moment: str, *arguments: Any) -> None:
        """Call one method of every callback."""
        with within(moment, self._board):
            for callback in self._callbacks:
                getattr(callback, moment)(self._trainer, *arguments)
