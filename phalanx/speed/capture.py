"""A whole training step as one CUDA graph: recorded once, then launched with one call.

A small step spends its time in Python and in launching kernels. `CapturedStep` takes the first steps as they are, looks
at one of them for what needs the host (`host_watch.py`), and records the next one: forward and backward passes of all
micro-batches, unscaling, clipping and the optimizer. Recording executes nothing, so the recorded step is replayed once
to be taken. A step that does not fit what was recorded (the last batch of an epoch) runs without it, on the same
weights and states. Gradients live in the memory of the graph alone: outside of it they are None, as after zero_grad.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from phalanx import torch_compat
from phalanx.errors import first_line
from phalanx.loop.formation import Formation
from phalanx.loop.forward import Forward
from phalanx.loop.gradients import count_replayed, undone_on_error
from phalanx.loop.loss_log import LossLog
from phalanx.loop.step import StepOutcome, Weighting
from phalanx.loop.train_state import TrainState
from phalanx.observe.call_ring import GRADIENTS
from phalanx.speed.host_watch import HostProbe, HostWatch
from phalanx.speed.recording import RecordedStep, StepBatches, StepCalls, StepParts, rates_of, takes_rate_on_device
from phalanx.torch_compat import pytree

_PROBED = 2
"""The step that is looked at: in the first one, optimizers make their states."""
_PROBED_COMPILED = 4
_PROBED_RANKS = 12
"""torch's DDP wants eleven steps before it is captured."""
_MOST_MICRO_BATCHES = 64
_MOST_MEMORY = 0.4
"""The share of the device's memory up to which a step is captured unless asked for: the activations of a smaller batch,
which runs without the graph, are held beside the memory of the graph."""
_PATIENCE = 50
"""This many steps may pass without two equal ones in a row."""


def why_not(formation: Formation) -> str:
    """Return why the steps of a run cannot be captured, as far as its settings tell; empty where they can."""
    config = formation.config
    reasons = {
        "that was asked for (capture = False)": config.capture is False,
        f"a CUDA graph needs a GPU, and the device is {formation.device.type}": formation.device.type != "cuda",
        (why := formation.strategy.why_not_captured): bool(why),
        "a captured step has one model and one optimizer": len(formation.optimizers) != 1 or len(formation.models) != 1,
        "on_nonfinite = 'skip' looks at every gradient on the host": config.on_nonfinite == "skip",
        "debug looks into the calls of the modules": config.debug is not None,
        "profile shows the phases of a step": formation.clock.on_enter is not None,
        "lost ranks are replaced, and a step waits on the GPU until it is complete": formation.gradients.gate
        is not None,
        f"a step has more than {_MOST_MICRO_BATCHES} micro-batches": formation.world.accumulation(
            config.gradient_accumulation_steps
        )
        > _MOST_MICRO_BATCHES,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def own_stream(formation: Formation) -> Callable[[], None] | None:
    """Let a run of several ranks leave CUDA's default stream, on which no graph can be recorded; return the undo.

    torch's DDP keeps the nodes that add gradients up, and each of them stays on the stream on which it was made.
    """
    device, config = formation.device, formation.config
    if formation.world_size == 1 or config.capture is False or formation.strategy.why_not_captured:
        return None
    before = torch.cuda.current_stream(device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(before)
    torch.cuda.set_stream(stream)

    def undo() -> None:
        before.wait_stream(stream)
        torch.cuda.set_stream(before)

    return undo


class CapturedStep:
    """Takes the steps of a training loop, as a CUDA graph once that is possible."""

    def __init__(
        self,
        formation: Formation,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        log: LossLog,
        say: Callable[[str, str], None],
        *,
        is_watched: bool = False,
    ) -> None:
        """`is_watched`: code of the user runs after steps, and may change what a recording depends on."""
        self._formation, self._model, self._optimizer, self._log, self._say = formation, model, optimizer, log, say
        self._parts = StepParts(formation, model, optimizer, log)
        self._is_watched = is_watched
        self._clip, self._ranks = formation.config.gradient_clipping, formation.world_size
        self._probed = _PROBED_COMPILED if formation.config.compile else _PROBED
        if self._ranks > 1:
            self._probed = _PROBED_RANKS
        self._stream: Any = None
        self._recording: RecordedStep | None = None
        self._form: tuple[Any, ...] = ()
        self._rates: list[float] = []
        self._varies = False
        self._equal = self._tried = 0
        self._watch: HostWatch | None = None
        self._loss: torch.Tensor | None = None
        self._loss_fn: Any = None
        self._why = ""
        self.is_off = False
        """Whether no step of this run is captured from here on."""

    def run(
        self,
        forward: Forward,
        batches: Iterator[Any],
        *,
        weighting: Weighting,
        measure_norm: bool = False,
        reseed: Callable[[int, int], None] | None = None,
    ) -> StepOutcome | None:
        """Take a step, as `train_step` does; None when the epoch has none left."""
        gradients, clock = self._formation.gradients, self._formation.clock
        step = gradients.steps + 1
        clock.enter("data")
        pulled, is_whole = self._pull(batches)
        clock.enter("forward")
        if self._recording is not None and self._is_watched:
            self.check()
        recording = self._recording
        if recording is not None and is_whole and recording.fits(pulled) and recording.follow_rates():
            graph = recording.graphs.get(measure_norm or self._measures)
            if graph is not None:  # the usual case
                if reseed is not None:
                    reseed(step, pulled.infos[0].offset)
                if gradients.scale is not None:  # after an eager step, whose scale the next one begins with
                    gradients.scale.update()
                recording.put(pulled)
                count_replayed(gradients, len(pulled.infos))
                return self._replay(recording, graph, step, pulled, measure_norm)
        calls = StepCalls(self._parts, forward, pulled, step, weighting, reseed=reseed)
        if not is_whole:
            calls.run_passes()
            clock.enter("other")
            return None
        recording = self._to_record(pulled, by_one=reseed is not None and len(pulled.infos) > 1)
        if recording is None:
            return self._take_eagerly(calls, measure_norm)
        if reseed is not None:
            reseed(step, pulled.infos[0].offset)
        recording.put(pulled)
        graph = self._record(recording, partial(calls.record, recording, measure_norm or self._measures))
        if graph is None:
            return calls.run(measure_norm)
        recording.graphs[measure_norm or self._measures] = graph
        return self._replay(recording, graph, step, pulled, measure_norm)

    @property
    def _measures(self) -> bool:
        """Whether every step has the norm of its gradients: several ranks have one graph only, recorded together."""
        return self._clip is not None or self._ranks > 1

    def _replay(
        self, recording: RecordedStep, graph: torch.cuda.CUDAGraph, step: int, pulled: StepBatches, measure_norm: bool
    ) -> StepOutcome:
        GRADIENTS.began = time.time()
        graph.replay()
        loss = recording.log_losses(step, pulled.infos)
        self._formation.clock.enter("other")
        norm = recording.norm if measure_norm or self._clip is not None else None
        return StepOutcome(loss.clone() if self._is_watched else loss, norm)

    def _pull(self, batches: Iterator[Any]) -> tuple[StepBatches, bool]:
        """Return the micro-batches up to the next boundary, and whether there is one."""
        gradients, pulled = self._formation.gradients, StepBatches([], [])
        for batch in batches:
            pulled.infos.append(gradients.current)
            pulled.batches.append(batch)
            if gradients.boundary:
                return pulled, True
        return pulled, False

    def _to_record(self, pulled: StepBatches, *, by_one: bool) -> RecordedStep | None:
        """Return the recording that this step is to be a part of; None: it runs without."""
        recording = self._recording
        if recording is not None and recording.follow_rates():
            return recording if recording.fits(pulled) else None  # with the norm, for the first time
        form, rates = pulled.form(), rates_of(self._optimizer)
        if recording is not None and self._ranks > 1:
            self.turn_off("the learning rate has changed since the ranks recorded a step")
            return None
        if recording is not None:  # its rates are part of it
            self._recording, self._tried = None, 0
        changed = bool(self._rates) and rates != self._rates
        self._varies = self._varies or changed
        self._equal = self._equal + 1 if form == self._form else 1
        self._form, self._rates = form, rates
        self._tried += 1
        if by_one:
            self._why = "batches are seeded one by one"
        waits = changed and not takes_rate_on_device(self._optimizer)
        may_record = self._equal > self._probed and not waits and not self._why
        if self._agreed(may_record):
            return self._new_recording(pulled)
        return None

    def _agreed(self, may_record: bool) -> bool:
        """Whether this step is to be recorded, on all ranks; turns captures off where it will not come to that."""
        if self._ranks > 1:  # nccl sets up what a graph needs on all ranks together
            if self._tried <= self._probed:
                return False
            may_record = bool(self._formation.reduce(float(may_record), "min") > 0)
        if may_record or (not self._why and self._ranks == 1 and self._tried <= _PATIENCE):
            return may_record
        why = "the shapes of the batches, or the learning rate, change too often"
        self.turn_off(self._why or (why if self._ranks == 1 else "a step of another rank cannot be captured"))
        return False

    def _new_recording(self, pulled: StepBatches) -> RecordedStep:
        assert self._loss is not None, "a step was taken"
        recording = self._recording = RecordedStep(pulled, self._loss, self._optimizer, self._log)
        if self._varies and takes_rate_on_device(self._optimizer):
            recording.read_rates_on_device()
        self._watch = self._new_watch()
        self._leave_small(True)
        return recording

    def _new_watch(self) -> HostWatch:
        return HostWatch(self._formation.unwrap(self._model), self._optimizer, self._loss_fn)

    def _leave_small(self, leave: bool) -> None:
        """Let loaders leave small batches on the host, or move them; and fetch ahead, unless a callback may notice."""
        for loader in self._formation.loaders:
            loader.sharded.leaves_small = leave
            loader.ranks_fetching_ahead = self._formation.world.env.ranks_here if leave and not self._is_watched else 0

    def _take_eagerly(self, calls: StepCalls, measure_norm: bool) -> StepOutcome:
        """Take a step without a recording; look at what it does on the host where it is the one before a recording."""
        if self.is_off or self._recording is not None or self._equal != self._probed:
            return calls.run(measure_norm)
        if any(not isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(calls.pulled.batches)):
            self._why = "a batch holds more than tensors"
        use = HostProbe(self._formation.unwrap(self._model), self._optimizer, calls.loss_fn)
        with use.watching():
            outcome = calls.run(measure_norm)
        self._loss_fn = calls.loss_fn
        unwatched = self._new_watch().unwatched
        too_much = f"{unwatched}, too many to be watched for changes" if unwatched else ""
        self._why = self._why or use.reason or too_much or self._too_large()
        self._loss = outcome.loss
        return outcome

    def _too_large(self) -> str:
        """Return why a step that needs much of the device's memory is not captured, unless that was asked for."""
        device = self._formation.device
        if device.type != "cuda" or self._formation.config.capture:
            return ""
        total = torch.cuda.get_device_properties(device).total_memory / self._formation.world.ranks_per_gpu
        used = torch.cuda.max_memory_allocated(device)
        if used <= _MOST_MEMORY * total:
            return ""
        sizes = f"{used / 2**30:.1f} of {total / 2**30:.1f} GiB"
        return f"a step uses {sizes}, and its graph may need as much again; capture=True tries it"

    def check(self) -> None:
        """Drop the recording where what it depends on has changed on the host, by a callback or between two epochs."""
        if self._recording is None or self._watch is None or not self._watch.has_changed():
            return
        if self._ranks > 1:  # another rank may not have changed, and would not record with this one
            self.turn_off("the model, the optimizer or their settings have changed since the ranks recorded a step")
        self.drop()

    def _record(self, recording: RecordedStep, body: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """Record a step; None where that is not possible: then nothing has changed."""
        device, gradients = self._formation.device, self._formation.gradients
        if gradients.scale is not None:  # after the last eager step: in the graph, each step does it at its end
            gradients.scale.update()
        if self._stream is None:  # with DDP the one on which it was made
            is_alone = self._ranks == 1
            self._stream = torch.cuda.Stream(device) if is_alone else torch.cuda.current_stream(device)  # type: ignore[no-untyped-call]
        graph, failed, before = torch.cuda.CUDAGraph(), None, torch.cuda.current_stream(device)
        try:
            with undone_on_error(gradients):
                try:
                    # Other threads go on: one that copies a checkpoint to the host must not end the capture.
                    options = {"pool": recording.pool, "stream": self._stream, "capture_error_mode": "thread_local"}
                    with recording.settings(), torch.cuda.graph(graph, **options):
                        body()
                except RuntimeError as error:
                    failed = error
                    torch.cuda.set_stream(before)  # torch has left it, and ends the capture before it comes back
                    torch_compat.end_failed_capture(device, recording.pool)
                if self._ranks > 1 and float(self._formation.reduce(float(failed is None), "min")) == 0:
                    failed = failed or RuntimeError("a step of another rank cannot be captured")
                if failed is not None:
                    raise failed
        except RuntimeError as error:
            if error is not failed:
                raise
            graph.reset()
            self.turn_off(_cause(error))
            return None
        # The capture has written the seed of dropout on its own stream: after that of the first replay, it would win.
        before.wait_stream(self._stream)
        if not recording.graphs:
            self._say(f"steps are launched as one CUDA graph from step {gradients.steps} on (capture)", "info")
        return graph

    def refuse(self, why: str) -> None:
        """Record no step from here on, for a reason that the step itself has shown."""
        self._why = self._why or why

    def turn_off(self, why: str) -> None:
        """Take all steps without a recording from here on, and say why."""
        self._say(not_captured(why), "warning" if self._formation.config.capture else "info")
        self.drop()
        self.is_off = True

    def drop(self) -> None:
        """Drop the recording; another one is made after as many steps as at first."""
        self._recording = None
        self._equal = self._tried = 0
        self._form, self._rates = (), []
        self._leave_small(False)


def captured_step(state: TrainState, *, is_watched: bool) -> CapturedStep | None:
    """Return what takes the steps of a training loop, or None if none of them can be captured; says why not."""
    formation = state.formation
    why = why_not(formation)
    if why:
        if formation.config.capture or (formation.config.capture is None and formation.device.type == "cuda"):
            state.report.say(not_captured(why), "warning" if formation.config.capture else "info")
        return None
    step = CapturedStep(
        formation, state.model, state.optimizer, state.report.loss_log, state.report.say, is_watched=is_watched
    )
    formation.undo_later(step.drop)  # a graph with collectives must not outlive the process group
    return step


def not_captured(why: str) -> str:
    """Return the message about a run whose steps are not captured."""
    return f"capture: CUDA graph capture is off: {why}"


def _cause(error: BaseException) -> str:
    """Return the first line of what went wrong in a capture: the first error, not those that follow from it."""
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    return first_line(error)
