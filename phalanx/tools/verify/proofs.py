"""`verify`, by four proofs: a layout against one process or another layout, a run against its resumption or faults."""

from __future__ import annotations

import dataclasses
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

from phalanx.config import FIELDS, DistributedConfig, resolve
from phalanx.config.fields import STRATEGY_NAMES
from phalanx.config.settings import settings_with
from phalanx.errors import PreemptedError, UsageError, unknown_name
from phalanx.host.files import close_scratch, open_scratch
from phalanx.host.gpus import count_gpus
from phalanx.launch import CallTarget
from phalanx.loop.faults import OBJECTS
from phalanx.observe.guard import say_to_user
from phalanx.reliability import Fault
from phalanx.run.record import log_folder
from phalanx.run.spec import launch_spec
from phalanx.run.start import run_on_ranks, write_payload
from phalanx.tools.verify.execute import LOOPS, Run, VerifyRequest, loops_for, read_recording
from phalanx.tools.verify.faults import PlannedFaults
from phalanx.tools.verify.probe import FLOAT32, Recording, compare, limits_of, same_bits
from phalanx.tools.verify.subject import GivenSubject, Subject, default_settings
from phalanx.tools.verify.verdict import MEASURES, Comparison, Verdict
from phalanx.world.env import read_rank_env
from phalanx.world.mesh import JobLayout, plan_layout

_ONE_PROCESS: dict[str, Any] = {
    "num_workers": 1,
    "capture": False,
    **{name: FIELDS[name].default for name in settings_with("split")},
}
"""One process takes a global batch in one piece, kernel by kernel."""

_AXIS_FIELDS = {"pp": "pipeline_parallel", "cp": "context_parallel", "tp": "tensor_parallel", "ep": "expert_parallel"}
_AXIS = re.compile(r"(pp|cp|tp|ep)([1-9]\d*)")

_QUIET_RUN: dict[str, Any] = {
    "epochs": None,
    "log_every_n_steps": 1,
    "verbosity": "quiet",
    "progress": False,
    **dict.fromkeys(("tensorboard", "mlflow", "wandb", "profile"), False),
    **dict.fromkeys(("run_dir", "checkpoint_dir", "checkpoint_frequency", "sinks", "metrics_port")),
    "resume_from_checkpoint": False,
    "max_restarts": 0,
}
"""Settings of a real run that are not part of the proof."""

_PARTS = 2
"""Every proof starts ranks twice: on the layout, and on what it is compared with."""
_FEWEST_FAULT_STEPS = 8
_DECAY = 0.9
_FAULT_SETTINGS: dict[str, Any] = {"max_restarts": 3, "heartbeat_timeout": 5.0}


def verify(
    model: Any,
    data: Any,
    loss_fn: Any = None,
    *,
    resume: bool = False,
    reshard: str | None = None,
    faults: bool = False,
    own_loop: bool = False,
    **settings: Any,
) -> Verdict:
    """Prove that a layout trains a model like one process; takes the settings of `DistributedConfig`.

    `model` is a module or a function that makes one, `data` a data set or a DataLoader over one. The verdict is true
    when they agree, and printing it shows the tables. With `resume` a stopped and resumed run is
    compared with one that never stopped, with `reshard="fsdp:4"` the checkpoint is loaded on another layout, with
    `faults` a run whose ranks are killed, fewer and more again is compared with one that nothing disturbs, with
    `own_loop` loops of a `Formation` train in place of the trainer.
    """
    name = getattr(model, "__name__", type(model).__name__)
    config = resolve(settings, recipe=default_settings(faults=faults), recipe_name="verify").config
    options = {"resume": resume, "reshard": reshard, "faults": faults, "own_loop": own_loop}
    return prove(GivenSubject(name, model, data, loss_fn), config, **options)  # type: ignore[arg-type]


def prove(
    subject: Subject,
    config: DistributedConfig,
    *,
    resume: bool = False,
    reshard: str | None = None,
    faults: bool = False,
    own_loop: bool = False,
) -> Verdict:
    """Run the proof that was asked for."""
    if resume + faults + own_loop + (reshard is not None) > 1:
        names = "--resume, --reshard, --faults and --own-loop"
        raise UsageError(f"{names} cannot be combined", hint="Run verify once for each.")
    with closing(Proof(subject, config)) as proof:
        if reshard is not None:
            return proof.against_layout(reshard)
        if faults:
            return proof.under_faults()
        if own_loop:
            return proof.in_own_loops()
        return proof.against_resumption() if resume else proof.against_one_process()


class Proof:
    """Runs a subject on layouts and compares the recordings."""

    def __init__(self, subject: Subject, config: DistributedConfig) -> None:
        self.subject = subject
        self.config = _quiet(config)
        self.layout = plan_layout(self.config, count_gpus())
        self.split = self.layout.mesh.dp_size * config.gradient_accumulation_steps
        self.steps = config.max_steps or default_settings()["max_steps"]
        self._folder = open_scratch("verify")
        self._progress = config.progress
        self._launches = 0

    def close(self) -> None:
        """Remove what the runs wrote."""
        close_scratch(self._folder)

    def against_one_process(self) -> Verdict:
        """Compare the layout with one process, in float64 and in float32."""
        alone = self.config.replace(**_ONE_PROCESS)
        precisions = ("float64", "float32")
        # The layout first: a model that does not suit it is reported before a whole run of one process.
        laid = self._launch(self.config, [self._run(f"laid-{kind}", self.config, kind) for kind in precisions])
        one = self._launch(alone, [self._run(f"one-{kind}", alone, kind) for kind in precisions])
        exact, rounded = one["one-float64"], one["one-float32"]
        fine, coarse = limits_of(exact, rounded)
        comparisons = [
            compare("float64: one process and the layout", exact, laid["laid-float64"], fine),
            compare("float32: one process and the layout", rounded, laid["laid-float32"], coarse),
        ]
        return self._verdict("give the result of one process", laid["laid-float64"], comparisons)

    def in_own_loops(self) -> Verdict:
        """Compare loops as users write them on the layout with the same loops in one process."""
        alone, loops = self.config.replace(**_ONE_PROCESS), loops_for(self.config)
        laid, one = (
            self._launch(config, [self._loop(loop, config, kind) for loop in loops for kind in ("float64", "float32")])
            for config in (self.config, alone)
        )
        comparisons = []
        for loop in loops:
            fine, coarse = limits_of(one[f"{loop}-float64"], one[f"{loop}-float32"])
            for kind, limits in (("float64", fine), ("float32", coarse)):
                name = f"{loop}-{kind}"
                comparisons.append(compare(f"{kind}: {LOOPS[loop]}", one[name], laid[name], limits))
        claim = "give the result of one process in your own loops"
        return self._verdict(claim, one[f"{loops[0]}-float64"], comparisons)

    def _loop(self, loop: str, config: DistributedConfig, dtype: str) -> Run:
        return dataclasses.replace(self._run(f"{loop}-{dtype}", config, dtype), loop=loop)

    def against_resumption(self) -> Verdict:
        """Stop after half the steps, resume in new processes, and compare bits with the run that never stopped."""
        recordings = self._launch(
            self.config, [self._run("straight", self.config, "float32"), self._stopped("float32")]
        )
        straight, resumed = recordings["straight"], self._resumed("float32", self.config)
        title = f"bits: uninterrupted, and resumed after step {self._half()}"
        comparison = compare(title, _without_first_step(straight), resumed, 0.0, labels=("uninterrupted", "resumed"))
        problems = _load_problems(recordings["stopped"], resumed)
        changed = same_bits(straight.after, resumed.after)
        if changed is not None:
            problems.append(f"{changed} is not equal to the last bit after step {self.steps}")
        claim = "end with the same bits when it is stopped and resumed"
        return self._verdict(claim, straight, [comparison], problems)

    def against_layout(self, text: str) -> Verdict:
        """Save on this layout, load on another, and compare the rest of the run."""
        other = self._other_layout(text)
        straight = [self._run(f"straight-{kind}", self.config, kind) for kind in ("float64", "float32")]
        recordings = self._launch(self.config, [*straight, self._stopped("float64")])
        resumed = self._resumed("float64", other)
        exact = _without_first_step(recordings["straight-float64"])
        fine, _ = limits_of(exact, recordings["straight-float32"])
        name = _layout_name(other, plan_layout(other, count_gpus()))
        title = f"float64: this layout, and {name} from step {self._half()} on"
        comparison = compare(title, exact, resumed, fine, labels=("this layout", "resharded"))
        claim = f"go on the same when its checkpoint is loaded on {name}"
        return self._verdict(claim, exact, [comparison], _load_problems(recordings["stopped"], resumed))

    def under_faults(self) -> Verdict:
        """Kill a rank, go on with half of them, then with all again, and compare with a run that nothing disturbs.

        With fixed_order every bit must be equal; otherwise sums in another order are rounded differently. Where ranks
        are replaced, the runs have an optimizer and a scheduler object and averaged weights: state that must survive.
        """
        exact, precise = self.config.fixed_order, "float32" if self.config.fixed_order else "float64"
        faults, claim = self._planned_faults()
        objects = self.config.recovery != "restart"
        averages = objects and self.config.pipeline_parallel == 1
        config = self.config.replace(ema_decay=self.config.ema_decay or _DECAY) if averages else self.config
        quiet = [self._run(f"quiet-{kind}", config, kind) for kind in {precise: 0, "float32": 0}]
        recordings = self._launch(config, quiet, {OBJECTS: "1"} if objects else {})
        undisturbed = _without_first_step(recordings[f"quiet-{precise}"])
        plan = PlannedFaults(self._folder / "faults.json", faults, objects=objects)
        hit = config.replace(**_FAULT_SETTINGS, **self._for_recovery(faults))
        disturbed = self._launch(hit, [self._run("faults", hit, precise, first_step=False)], plan.variables)
        limits = dict.fromkeys(MEASURES, FLOAT32) | {"parameters": 0.0}
        if not exact:
            limits, _ = limits_of(recordings["quiet-float64"], recordings["quiet-float32"])
        title = f"{'bits' if exact else precise}: undisturbed, and under faults"
        comparison = compare(title, undisturbed, disturbed["faults"], limits, labels=("undisturbed", "under faults"))
        problems = [f"the fault {fault} did not happen" for fault in plan.missing()]
        if exact and (changed := same_bits(undisturbed.after, disturbed["faults"].after)) is not None:
            problems.append(f"{changed} is not equal to the last bit after step {self.steps}")
        ends = "end with the same bits" if exact else "end with the same weights, within rounding,"
        return self._verdict(f"{ends} when {claim}", undisturbed, [comparison], problems)

    def _for_recovery(self, faults: list[Fault]) -> dict[str, Any]:
        """Return the settings with which the ranks can be restarted, or become fewer."""
        if self.config.recovery == "restart":
            return {"checkpoint_frequency": "1 steps"}
        sizes = [fault.ranks for fault in faults if fault.ranks]
        return {"num_workers": (min(sizes), self.layout.world_size)} if sizes else {}

    def _planned_faults(self) -> tuple[list[Fault], str]:
        """Return the faults that this layout can survive, and what happens in words."""
        ranks, steps = self.layout.world_size, self.steps
        few = ["2 ranks (--num-workers 2)"] if ranks < 2 else []
        few += [f"{_FEWEST_FAULT_STEPS} steps (--max-steps 12)"] if steps < _FEWEST_FAULT_STEPS else []
        if few:
            layout = f"{ranks} rank{'s' * (ranks > 1)} and {steps} steps"
            raise UsageError(f"--faults needs more than {layout}", hint=f"Give at least {' and '.join(few)}.")
        kill = Fault("kill", steps // 4, rank=ranks - 1)
        if self.config.recovery == "restart":
            return [kill], "a rank is killed and all restart from a checkpoint"
        if self.config.recovery != "resize":
            return [kill], "a rank is killed and replaced"
        fewer = ranks // 2
        resized = [Fault("scale", steps // 2, ranks=fewer), Fault("scale", 3 * steps // 4, ranks=ranks)]
        return [kill, *resized], f"a rank is killed and the {ranks} ranks become {fewer}, then {ranks} again"

    def _half(self) -> int:
        if self.steps < 2:
            raise UsageError(f"max_steps = {self.steps}: stopping half-way needs at least 2 steps")
        return self.steps // 2

    def _stopped(self, dtype: str) -> Run:
        config = self.config.with_trusted(checkpoint_dir=str(self._folder / "kept"))
        return self._run("stopped", config, dtype, stop_after=self._half())

    def _resumed(self, dtype: str, config: DistributedConfig) -> Recording:
        """Resume from the checkpoint in new processes."""
        resuming = config.with_trusted(resume_from_checkpoint=str(self._folder / "kept"))
        return self._launch(config, [self._run("resumed", resuming, dtype)])["resumed"]

    def _run(
        self,
        name: str,
        config: DistributedConfig,
        dtype: str,
        stop_after: int | None = None,
        *,
        first_step: bool = True,
    ) -> Run:
        ranks = plan_layout(config, count_gpus()).mesh.dp_size
        return Run(name, config, dtype, self.split, ranks, stop_after, first_step)

    def _launch(
        self, config: DistributedConfig, runs: list[Run], env: Mapping[str, str] | None = None
    ) -> dict[str, Recording]:
        """Start the ranks of one layout and let them execute the runs."""
        layout = plan_layout(config, count_gpus())
        placed = [dataclasses.replace(run, config=run.config.with_trusted(device=layout.device)) for run in runs]
        payload = self._folder / f"{runs[0].name}.pkl"
        write_payload(VerifyRequest(self.subject, placed), payload)
        target = CallTarget("phalanx.tools.verify.execute:run_request", str(payload))
        self._launches += 1
        title = f"part {self._launches} of {_PARTS}: {', '.join(run.name for run in runs)} on {layout.ranks}"
        with log_folder(None) as logs, _shown(title, enabled=self._progress):
            try:
                run_on_ranks(launch_spec(config, layout, target, logs, env=env), config)
            except PreemptedError:  # the ranks' hint names checkpoint_dir, which verify does not use
                raise PreemptedError(
                    "verify was stopped before it could compare", hint="It keeps nothing: run the same command again."
                ) from None
        return {run.name: read_recording(self._folder, run.name) for run in runs}

    def _verdict(
        self, claim: str, run: Recording, comparisons: list[Comparison], problems: Sequence[str] = ()
    ) -> Verdict:
        size = f"global batch {run.global_batch}, {run.parameters:,} parameters, dropout off"
        name = _layout_name(self.config, self.layout)
        return Verdict(self.subject.name, name, claim, f"{self.steps} steps, {size}", comparisons, list(problems))

    def _other_layout(self, text: str) -> DistributedConfig:
        strategy, _, rest = text.partition(":")
        count, *axes = rest.split(":")
        sizes = [_AXIS.fullmatch(axis) for axis in axes]
        if not count.isdigit() or int(count) < 1 or None in sizes:
            raise UsageError(
                f"--reshard {text}: not a layout",
                hint="Write <strategy>:<ranks>, for example ddp:1, and other axes after it: fsdp:8:pp2:tp2",
            )
        if strategy not in STRATEGY_NAMES:
            raise UsageError(unknown_name("strategy", strategy, STRATEGY_NAMES))
        degrees = {_AXIS_FIELDS[size[1]]: int(size[2]) for size in sizes if size is not None}
        return self.config.replace(**{**_ONE_PROCESS, **degrees, "strategy": strategy, "num_workers": int(count)})


@contextmanager
def _shown(title: str, *, enabled: bool) -> Iterator[None]:
    """Show what runs: with the time on a terminal, as two lines elsewhere."""
    began = time.monotonic()
    if enabled and sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            progress.add_task(title, total=None)
            yield
    else:
        yield
    if enabled:
        say_to_user(f"{title}: {time.monotonic() - began:.1f} s")


def _quiet(config: DistributedConfig) -> DistributedConfig:
    """Return the settings of the layout, without logging and checkpoints; raise for what cannot be verified."""
    if config.mixed_precision is not False:
        raise UsageError(
            f"mixed_precision = {config.mixed_precision!r}: verify compares in float64 and float32",
            hint="Leave mixed_precision out: its rounding would hide the errors of a layout.",
        )
    if config.facts.shards_by_engine:
        raise UsageError(
            f"verify compares in float64, and {config.resolved_strategy} keeps weights in float32",
            hint="The same stages by fsdp can be verified: leave the engine out and set zero_stage.",
        )
    if config.facts.drifts or config.compression != "none":
        means = f"compression = {config.compression!r}" if config.compression != "none" else config.resolved_strategy
        raise UsageError(
            f"{means} does not give the result of one process, and is not meant to",
            hint="Judge it by the loss it reaches, next to a run with --strategy ring.",
        )
    env = read_rank_env()
    if env is not None and env.world_size > 1:
        raise UsageError(
            f"verify starts its own ranks, but {env.started_by} started {env.world_size} of it",
            hint="Run phalanx verify once, by itself.",
        )
    if config.num_nodes > 1:
        raise UsageError(
            "verify runs on one machine", hint="Verify the same number of ranks here, with --device cpu if need be."
        )
    return config.replace(max_steps=config.max_steps or default_settings()["max_steps"], **_QUIET_RUN)


def _layout_name(config: DistributedConfig, layout: JobLayout) -> str:
    strategy = config.resolved_strategy
    if config.zero_stage is not None:
        strategy += f" (ZeRO {config.zero_stage})"
    elif config.resolved_sharding != "full":  # with other axes ddp shards the data axis too
        strategy += f" ({config.resolved_sharding})"
    axes = {short: getattr(config, name) for short, name in _AXIS_FIELDS.items()}
    strategy += "".join(f" x {short}{size}" for short, size in axes.items() if size > 1)
    counts = {"{} on each GPU": layout.ranks_per_gpu, "accumulation {}": config.gradient_accumulation_steps}
    more = (words.format(count) for words, count in counts.items() if count > 1)
    return ", ".join([strategy, f"{layout.ranks} on {layout.device}", *more])


def _without_first_step(straight: Recording) -> Recording:
    """Leave out what the probe records in the first step: a resumed run begins with another one."""
    return dataclasses.replace(straight, activations={}, gradients={})


def _load_problems(stopped: Recording, resumed: Recording) -> list[str]:
    """Compare loaded with saved weights: they must be equal to the last bit, on any layout."""
    changed = same_bits(stopped.after, resumed.before)
    return [] if changed is None else [f"{changed} was loaded with other bits than it was saved with"]
