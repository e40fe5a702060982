"""A dry run: the real code of one rank of each kind, on a process group and on tensors that do not exist.

The strategy, the model, the loss, backward and the optimizer run as they do in training; other ranks answer at once,
and tensors have shapes but no memory. So a run on many GPUs is tried on a laptop: that it starts, what each kind of
rank holds at its peak, and what it sends. Ranks differ by their pipeline stage; all others are alike.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from phalanx import torch_fakes
from phalanx.config import DistributedConfig
from phalanx.config.strategies import facts_of
from phalanx.errors import ModelError, PhalanxError, UsageError
from phalanx.loop.formation import Formation
from phalanx.loop.metrics import LossFn
from phalanx.loop.optim import build_optimizer
from phalanx.models import loss, moe
from phalanx.models.contract import InitialisesWeights, implements
from phalanx.strategies.tensors import find_blocks
from phalanx.tools.plan.memory_trace import Collective, DryRun, FakeRank, Recorder, Sent
from phalanx.world.env import RankEnv, export_rank_env
from phalanx.world.groups import build_device_mesh
from phalanx.world.mesh import Mesh, check_device, plan_mesh
from phalanx.world.splits import SCHEDULES, choose_microbatches


def dry_run(
    build: Callable[[], nn.Module],
    batch: Callable[[int], Any],
    config: DistributedConfig,
    world_size: int,
    ranks_per_node: int,
    *,
    loss_fn: LossFn | None = None,
) -> DryRun:
    """Try a config on a number of ranks; what training would refuse is raised as training would.

    `build` returns the model and is called on the meta device; `batch(size)` returns a batch of that size.
    """
    if dist.is_initialized():
        raise UsageError("a dry run needs a process without a process group", hint="Call it before training, or apart.")
    check_device(config, "cpu" if config.device == "cpu" else "cuda")
    mesh = plan_mesh(config, world_size, ranks_per_node)
    used, notes = _as_tried(config, mesh)
    job = _Job(build, batch, used, mesh, ranks_per_node, loss_fn, on_gpus=config.device != "cpu")
    kinds = {"every rank": 0} if mesh.pp == 1 else _stage_ranks(mesh)
    shapes: list[Any] = []
    torch_fakes.preload()
    ranks = tuple(job.run(kind, rank, shapes) for kind, rank in kinds.items())
    return DryRun(world_size, mesh.sizes, ranks, notes)


def _stage_ranks(mesh: Mesh) -> dict[str, int]:
    """Return the first rank of each kind of pipeline stage; the first stage is the first to be tried."""
    row = mesh.groups("pp")[0]
    middle = {"middle stage": row[1]} if len(row) > 2 else {}
    return {"first stage": row[0], **middle, "last stage": row[-1]}


def _as_tried(config: DistributedConfig, mesh: Mesh) -> tuple[DistributedConfig, tuple[str, ...]]:
    """Return the config for fake CPU tensors, and what that changes."""
    notes = ["memory is what tensors need: the CUDA context, nccl and fragmentation come on top"]
    changes: dict[str, Any] = {"device": "cpu", "strategy": config.resolved_strategy, "communication_backend": None}
    if config.strategy == "auto" and config.zero_stage is not None:
        changes["strategy"] = "fsdp"
    if not facts_of(changes["strategy"]).axes:
        raise UsageError(
            f"a dry run of strategy = {changes['strategy']!r} is not possible",
            hint="It runs ddp and fsdp, with tensor_parallel, pipeline_parallel, context_parallel and expert_parallel.",
        )
    if config.mixed_precision in (True, "fp16"):
        changes["mixed_precision"] = "bf16"
        notes.append("mixed precision is tried in bf16, which has the sizes of fp16; the loss scale is left out")
    if config.compile:
        changes["compile"] = False
        notes.append("compile: the operations are those of the model as written; a compiled one needs less")
    if config.expert_parallel > 1:
        notes.append("expert_parallel: all experts get the same number of tokens")
    if config.offload == "cpu":
        notes.append("offload = 'cpu': parameters, gradients and optimizer states are in host memory")
    return config.with_trusted(**changes), tuple(notes)


@dataclass(frozen=True)
class _Job:
    """What every rank of a dry run is given."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    config: DistributedConfig
    mesh: Mesh
    ranks_per_node: int
    loss_fn: LossFn | None
    on_gpus: bool

    def run(self, kind: str, rank: int, shapes: list[Any]) -> FakeRank:
        """Run one rank; `shapes`: what the stages before it have sent."""
        began = time.perf_counter()
        many, fewer, more = self._counts()
        memory, calls = _apart(self._step, rank, more, shapes)
        if many > more:  # a step with fewer micro-batches tells what each of them adds
            memory_before, calls_before = _apart(self._step, rank, fewer, shapes)
            factor = (many - more) / (more - fewer)
            calls = _continued(calls_before, calls, factor)
            if self.mesh.pp > 1:  # the batch and the buffers of all micro-batches are held, and by gpipe activations
                memory = _continued(memory_before, memory, factor)
        held: dict[str, dict[str, int]] = {}
        for (unit, what), size in memory.items():
            held.setdefault(unit, {})[what] = round(size)
        sent = sorted(_by_axis(calls, self.mesh), key=lambda one: -one.total)
        return FakeRank(kind, rank, round(sum(memory.values())), held, tuple(sent), time.perf_counter() - began)

    def _counts(self) -> tuple[int, int, int]:
        """Return the micro-batches of a step, and two smaller numbers that are run instead of many."""
        config, stages = self.config, self.mesh.pp
        if stages == 1:
            many = config.gradient_accumulation_steps
            return many, min(many, 2), min(many, 3)  # the first, one between, and the last
        schedule = SCHEDULES[config.pipeline_schedule]
        many = choose_microbatches(config.microbatches, config.batch_size or 1, stages, schedule)
        rounds = schedule.stages_per_rank
        # From here on every stage holds as many micro-batches as it ever will.
        possible = (n for n in itertools.count(rounds * (stages + 1)) if n % max(1, n // stages) == 0)
        return many, min(many, next(possible)), min(many, next(possible))

    def _step(self, rank: int, count: int, shapes: list[Any]) -> tuple[dict[Any, float], dict[Collective, float]]:
        """Run a step of some micro-batches; return the bytes at its peak, and its collectives."""
        config = self.config
        if self.mesh.pp == 1:
            config = config.with_trusted(gradient_accumulation_steps=count)
        else:
            size = (config.batch_size or 1) // self._counts()[0]
            config = config.with_trusted(microbatches=count, batch_size=size * count)
        with torch.device("meta"):
            model = self.build()
        if not implements(model, InitialisesWeights):
            model.init_weights = lambda: None  # type: ignore[assignment]
        _join(rank, self.mesh.world_size, self.ranks_per_node)
        formation, recorder = Formation(config), Recorder()
        if self.mesh.world_size > 1:
            build_device_mesh(self.mesh, "cpu")  # before tensors are fake: it reads values
        if self.on_gpus:
            _compute_as_on_gpus()
        torch_fakes.pass_shapes(shapes)
        with torch_fakes.fake_mode(), recorder, recorder.resizes():
            return _take_step(formation, recorder, model, self.batch, self.loss_fn)


def _apart(run: Callable[..., Any], rank: int, count: int, shapes: list[Any]) -> Any:
    """Run a rank in a process of its own, which torch's groups and caches end with; raise what it raises.

    Forked: the model's builder may be a function that cannot be pickled. `shapes` gets what the rank adds to it.
    """
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)

    def answer() -> None:
        try:
            found: Any = run(rank, count, shapes), shapes
        except PhalanxError as error:
            found = error
        except Exception as error:  # noqa: BLE001 - of any kind: it is raised again in the parent
            found = ModelError(f"the dry run failed in rank {rank}: {type(error).__name__}: {error}")
            found.add_note(traceback.format_exc())
        there.send(found)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, which the child does not use
        child = context.Process(target=answer)
        child.start()
    there.close()
    try:
        found = here.recv()
    except EOFError:
        child.join()
        raise ModelError(f"the dry run of rank {rank} ended with exit code {child.exitcode}") from None
    finally:
        child.kill()  # where this process was interrupted; else it has ended
        child.join()
    if isinstance(found, Exception):
        raise found
    shapes[:] = found[1]
    return found[0]


def _join(rank: int, world_size: int, per_node: int) -> None:
    """Make this process a rank of a group whose other ranks do not exist."""
    warnings.simplefilter("ignore")
    logging.disable()  # torch warns that a dry run is one
    os.environ["PHALANX_GENERATION"] = "1"  # weights are not sent from rank 0 at the start, which no step does
    node = rank // per_node
    export_rank_env(RankEnv(rank, rank % per_node, world_size, per_node, node, "127.0.0.1", 0, started_by="torchrun"))
    torch_fakes.use_real_meshes()
    moe.part_sizes = _equal_parts  # of tokens to experts: no value says which of them get how many
    if world_size > 1:
        torch_fakes.join_fake_group(rank, world_size)


def _equal_parts(counts: torch.Tensor, total: int) -> list[int]:
    each, more = divmod(total, counts.numel())
    return [each + (index < more) for index in range(counts.numel())]


def _compute_as_on_gpus() -> None:
    """Run under autocast in fp32 what it does so on GPUs alone, and the head's kernels without their arithmetic."""
    for owner, names in ((torch, "layer_norm group_norm softmax log_softmax"), (torch.Tensor, "softmax log_softmax")):
        for name in names.split():  # not by a mode: those end where backward starts, which recomputes blocks
            setattr(owner, name, _in_fp32(getattr(owner, name)))
    loss._cross_entropy = _in_place_loss
    loss._add_product = _in_place_sum


def _in_fp32(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            args = tuple(one.float() if isinstance(one, torch.Tensor) else one for one in args)
        return function(*args, **kwargs)

    return call


def _in_place_loss(logits: torch.Tensor, targets: torch.Tensor, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros_like(targets, dtype=torch.float32), logits


def _in_place_sum(total: torch.Tensor | None, gradient: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    if rows.dtype is torch.bfloat16:
        return rows.new_empty(gradient.shape[1], rows.shape[1], dtype=torch.float32) if total is None else total
    share = gradient.t() @ rows
    return share if total is None else total.add_(share)


def _take_step(
    formation: Formation, recorder: Recorder, model: nn.Module, batch: Callable[[int], Any], loss_fn: LossFn | None
) -> tuple[dict[Any, float], dict[Collective, float]]:
    """Prepare the model, give the optimizer its states, and measure one step."""
    units = _units(model)
    wrapped = formation.prepare(model)
    if isinstance(wrapped, DistributedDataParallel):
        wrapped.register_comm_hook(None, _all_reduce)
    named = _by_unit(formation.unwrap(wrapped), units)
    recorder.mark_all("gradients", "gradients")  # the buckets of ddp
    for unit, parameters in named.items():
        recorder.mark(parameters, "parameters", unit)
    optimizer = formation.prepare(build_optimizer(formation.config, wrapped.parameters(), formation.device))
    _make_states(optimizer, recorder, named)
    size = formation.config.batch_size or 1
    formation.strategy.expect_batches(wrapped, size)
    stop = recorder.watch(units, named)
    recorder.restart()
    for _ in range(formation.config.gradient_accumulation_steps):
        formation.train_batch(wrapped, batch(size), loss_fn)
    if formation.config.gradient_clipping is not None:
        formation.clip_grad_norm(formation.config.gradient_clipping)
    recorder.unit = "optimizer"
    optimizer.step()
    stop()
    return dict(recorder.at_peak), dict(recorder.collectives)


def _continued(fewer: Mapping[Any, float], more: Mapping[Any, float], factor: float) -> dict[Any, float]:
    """Continue the line through two values of each entry."""
    return {
        key: more.get(key, 0) + factor * (more.get(key, 0) - fewer.get(key, 0)) for key in fewer.keys() | more.keys()
    }


def _units(model: nn.Module) -> dict[nn.Module, str]:
    """Return the parts that memory is reported for: the repeated blocks of a list as one, and all other children."""
    blocks = {block: name.rpartition(".")[0] + ".*" for name, block in find_blocks(model).items()}
    lists = {name.removesuffix(".*") for name in blocks.values()}
    others = {child: name for name, child in model.named_children() if name not in lists}
    return {**others, **blocks}


def _by_unit(model: nn.Module, units: Mapping[nn.Module, str]) -> dict[str, list[nn.Parameter]]:
    """Return the parameters of each part; a parameter of two parts belongs to the first."""
    found: dict[str, list[nn.Parameter]] = {}
    seen: set[int] = set()
    for module, unit in ((module, unit) for module in model.modules() if (unit := units.get(module)) is not None):
        new = [parameter for parameter in module.parameters() if id(parameter) not in seen]
        seen.update(map(id, new))
        found.setdefault(unit, []).extend(new)
    rest = [parameter for parameter in model.parameters() if id(parameter) not in seen]
    return {**found, "model": rest} if rest else found


def _make_states(optimizer: torch.optim.Optimizer, recorder: Recorder, named: Mapping[str, list[nn.Parameter]]) -> None:
    """Take a step without effect, so that the states exist, as they do from the second step on."""
    trained = {unit: [p for p in parameters if p.requires_grad] for unit, parameters in named.items()}
    before = {p: p.grad for parameters in trained.values() for p in parameters}
    for parameter in before:
        parameter.grad = torch.zeros_like(parameter)
    type(optimizer).step(optimizer)
    for parameter, gradient in before.items():
        parameter.grad = gradient
    for unit, parameters in trained.items():
        states = (value for p in parameters for value in optimizer.state[p].values())
        recorder.mark((state for state in states if isinstance(state, torch.Tensor)), "optimizer", unit)


def _all_reduce(_, bucket):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202 - torch reads the annotations
    """Do what ddp does by itself; the work of a fake group has no result that it could wait for."""
    dist.all_reduce(bucket.buffer())
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _by_axis(calls: Mapping[Collective, float], mesh: Mesh) -> Iterator[Sent]:
    for call, count in calls.items():
        places = [mesh.place(rank) for rank in call.ranks]
        axes = [axis for axis in mesh.sizes if len({place[axis] for place in places}) > 1]
        yield Sent(call.op, " x ".join(axes) or "one rank", len(call.ranks), call.bytes, count)
