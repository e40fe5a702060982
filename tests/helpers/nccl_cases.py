"""What several nccl ranks run on one GPU, by number of ranks: each case is compared with one process on that GPU.

`nccl_launch` starts the ranks, and `tests/gpu/test_nccl_parity.py` reads what they measured. All cases of a number
of ranks run in the same processes, one after the other: to start those takes longer than to train such small models.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layouts import MODELS, SHAPE, difference, fit, make_tokens
from matrix import GLOBAL_BATCH, LAYOUTS, TOLERANCES, Layout, Trained, common, differences, split_settings
from outer_rounds import train_by_formation, written_out
from torch.utils.data import DataLoader

from phalanx.comm.collectives import ALGORITHMS, P2PChannel
from phalanx.config.strategies import COMPRESSORS
from phalanx.observe.history import History
from phalanx.run.weights import whole_weights

BF16 = 0.05
"""How far a bf16 run may be from one process in bf16: relative to how far the weights have moved, and to each norm."""
Measured = dict[str, float]


@dataclass(frozen=True)
class Place:
    """Where a case runs: the folder that all launches share, and what every config has."""

    folder: Path
    settings: dict[str, Any]

    def of(self, name: str) -> str:
        """Return a folder of a run."""
        return str(self.folder / name.replace(" ", "-").replace(",", ""))


@dataclass(frozen=True)
class Case:
    """A function that returns by how much something differs, and how much it may."""

    run: Callable[[Place], Measured]
    bound: float = 0.0
    owns_group: bool = False
    """Whether it joins the other ranks itself, with another backend than plain nccl."""
    seconds: float = 60.0
    needs: str = ""
    """A package without which it is left out."""


@dataclass(frozen=True)
class Kind:
    """What a layout is compared with: a model, and the settings that one process has as well."""

    model: str = "llama"
    layers: int = 2
    dtype: str = "float32"
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of its file."""
        more = [f"{name}={value}" for name, value in sorted(self.settings.items())]
        return " ".join(["one", self.model, str(self.layers), self.dtype, *more])

    @property
    def is_half(self) -> bool:
        return "mixed_precision" in self.settings

    def run(self, place: Place, name: str, **layout: Any) -> dict[str, Any]:
        """Train, evaluate and predict on this rank."""
        settings = {**common(self.model, self.layers, self.dtype), **self.settings, **layout, **place.settings}
        trainer, history = fit(place.of(name), **settings)
        weights = whole_weights(trainer.model)
        assert weights is not None
        data = DataLoader(make_tokens(11, 8, ignoring=False))
        predicted = trainer.predict(data)
        return {
            "trained": ({key: value.cpu().clone() for key, value in weights.items()}, *_history(history)),
            "evaluated": trainer.evaluate(data),
            "predicted": None if predicted is None else predicted.cpu(),
        }


def _history(history: History) -> tuple[dict[str, float], list[float]]:
    return history.epochs[-1].val, [step["grad_norm"] for step in history.steps]


def reference(kind: Kind, place: Place) -> Measured:
    """Train in one process, keep the result for the layouts, and compare with the CPU."""
    found = kind.run(place, kind.name, batch_size=GLOBAL_BATCH)
    torch.save(found, place.of(kind.name) + ".pt")
    if kind.is_half:
        return {}
    on_cpu = replace(place, settings={"device": "cpu"})
    return compare(found, kind.run(on_cpu, f"cpu {kind.name}", batch_size=GLOBAL_BATCH), kind)


def equals_one(
    layout: Layout, kind: Kind, accumulation: int, name: str, place: Place, *, norms: bool = True
) -> Measured:
    """Train on the layout's ranks, and compare with one process; `norms`: those of gradients of whole batches, too."""
    found = kind.run(place, name, **split_settings(layout, accumulation))
    return compare(found, _expected(kind, place), kind, norms=norms)


def _expected(kind: Kind, place: Place) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(place.of(kind.name) + ".pt")
    return found


def compare(found: dict[str, Any], expected: dict[str, Any], kind: Kind, *, norms: bool = True) -> Measured:
    """Return all differences, of gradient norms only on the main rank, which keeps the history."""
    here = differences(found["trained"], expected["trained"], norms=norms and bool(found["trained"][2]))
    ours, theirs = found["evaluated"], expected["evaluated"]
    here |= {f"evaluated {name}": abs(ours[name] - value) / (abs(value) or 1.0) for name, value in theirs.items()}
    if kind.is_half:  # rounding may change which of two scores is larger
        here = {name: value for name, value in here.items() if "loss" in name or "norm of" in name}
        here["movement"] = _movement(found["trained"], expected["trained"], kind)
    elif found["predicted"] is not None:
        here["predictions"] = difference(found["predicted"], expected["predicted"])
    return here


def _movement(found: Trained, expected: Trained, kind: Kind) -> float:
    """Return how far two runs are apart, relative to how far the weights have moved from where they began."""
    torch.manual_seed(3)
    begin = MODELS[kind.model](**{**SHAPE, "layers": kind.layers}).state_dict()
    apart, moved = (
        torch.stack([(one[name] - other[name]).norm() for name in expected[0]]).norm()
        for one, other in ((found[0], expected[0]), (begin, expected[0]))
    )
    return (apart / moved).item()


def save(source: Layout, target: str, kind: Kind, place: Place) -> Measured:
    """Stop after three steps, with a checkpoint for another layout."""
    settings = {**common(kind.model, kind.layers, kind.dtype), **split_settings(source, 4), **place.settings}
    fit(place.of(f"before {target}"), max_steps=3, checkpoint_dir=place.of(f"checkpoint {target}"), **settings)
    return {}


def load(layout: Layout, target: str, kind: Kind, place: Place, *, device: str = "") -> Measured:
    """Continue from a checkpoint of another layout; the end is that of a run without a stop."""
    if device:
        place = replace(place, settings={"device": device})
    resume = {"checkpoint_dir": place.of(f"checkpoint {target}"), "resume_from_checkpoint": True}
    found = kind.run(place, f"after {target}", **split_settings(layout, 4 if layout.ranks > 1 else 1), **resume)
    return compare(found, _expected(kind, place), kind, norms=False)


def compressed(name: str, strategy: str, place: Place) -> Measured:
    """Ranks stay equal to the last bit, and the loss falls."""
    settings = {"strategy": strategy, "compression": name, "batch_size": 4, "epochs": 3, "bucket_cap_mb": 0.02}
    trainer, history = fit(place.of(f"{strategy} {name}"), dtype="float32", **settings, **place.settings)
    own = hashlib.sha256(b"".join(v.cpu().numpy().tobytes() for v in trainer.model.state_dict().values())).hexdigest()
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, own)
    losses = [step["loss"] for step in history.steps]
    return {
        "ranks with other weights": float(len(set(digests)) - 1),
        "steps whose loss is not below the first": float(bool(losses) and losses[-1] >= losses[0]),
    }


def rounds(strategy: str, place: Place) -> Measured:
    """Weights after rounds of a rank's own steps equal the published algorithm in one process."""
    weights, _ = train_by_formation(strategy, **place.settings)
    expected = written_out(strategy, dist.get_world_size())
    return {
        name: difference(torch.tensor(weights[name], dtype=torch.float64), value) for name, value in expected.items()
    }


def collectives(place: Place) -> Measured:
    """Every algorithm of Phalanx's own collectives, on sizes that the ranks do not divide."""
    channel = P2PChannel()
    rank, size = channel.rank, channel.size
    found: Measured = {}
    for count in (1, 5, 1003):
        every = torch.stack([torch.arange(count) % 7 + peer + 1.0 for peer in range(size)]).to(channel.device)
        totals = {"sum": every.sum(0), "mean": every.mean(0), "max": every.amax(0)}
        for algorithm, function in ALGORITHMS["all_reduce"].items():
            for op, expected in totals.items():
                function(own := every[rank].clone(), channel, op)
                found[f"{algorithm} {op} of {count}"] = difference(own, expected)
        own = every[rank].clone()
        makes = {
            "all_gather": (own, every),
            "all_to_all": (own.expand(size, -1).contiguous(), every),
            "gather": (own, every if rank == 0 else None),
            "reduce_scatter": (every, size * every[rank : rank + 1]),
        }
        for name, (given, right) in makes.items():
            got = _first(name)(given, channel)
            found[f"{name} of {count}"] = 0.0 if got is right is None else difference(got, right)
        for name, arguments in {"broadcast": (), "scatter": (every if rank == 0 else None,)}.items():
            own = every[rank].clone() if name == "broadcast" else torch.zeros(count, device=channel.device)
            _first(name)(own, channel, *arguments)
            found[f"{name} of {count}"] = difference(own, every[0] if name == "broadcast" else every[rank])
    ALGORITHMS["barrier"]["dissemination"](channel)
    return found


def _first(name: str) -> Callable[..., Any]:
    return next(iter(ALGORITHMS[name].values()))


def _matrix() -> dict[int, dict[str, Case]]:
    found: dict[int, dict[str, Case]] = {1: {}, 2: {}, 4: {}, 8: {}}
    kinds: dict[str, Kind] = {}

    def add(name: str, layout: Layout, kind: Kind, accumulation: int = 4, *, norms: bool = True, **more: Any) -> None:
        kinds[kind.name] = kind
        bound = BF16 if kind.is_half else TOLERANCES[kind.dtype]
        run = partial(equals_one, layout, kind, accumulation, name, norms=norms)
        found[layout.ranks][name] = Case(run, bound, **more)

    for name, layout in (LAYOUTS | MORE_LAYOUTS).items():
        own = {"owns_group": layout.settings.get("offload") == "cpu"}
        add(f"{name}, float32", layout, Kind(layout.model, layout.layers), **own)
    for name in HALF:
        kind = Kind(LAYOUTS[name].model, LAYOUTS[name].layers, settings={"mixed_precision": "bf16"})
        add(f"{name}, bf16", LAYOUTS[name], kind, 1)
    for feature, settings in SHARED.items():
        for name, layout in PLAIN.items():
            add(f"{name}, {feature}", layout, Kind(settings=settings), 2)
    # Its norms are those of a rank's own gradients.
    add("local-sgd, every step", Layout(2, 2, EVERY_STEP), Kind(settings=WITHOUT_CLIPPING), 1, norms=False)
    for name, layout in (LAYOUTS | MORE_LAYOUTS).items():
        own = {"owns_group": layout.settings.get("offload") == "cpu"}
        add(f"{name}, float64", layout, Kind(layout.model, layout.layers, "float64"), **own)
        if layout.tied:
            add(f"{name}, gpt, float64", layout, Kind("gpt", layout.layers, "float64"), **own)
    for name, layout in COMPILED.items():
        add(f"{name}, compiled", layout, Kind(), 1, seconds=240.0)
    found[1] = {kind.name: Case(partial(reference, kind), _bound_to_cpu(kind)) for kind in kinds.values()}
    return found


def _bound_to_cpu(kind: Kind) -> float:
    """Between a GPU and the CPU: rotary positions are angles in float32, whose sines differ in the last bit."""
    return TOLERANCES[kind.dtype] if kind.model == "gpt" else max(TOLERANCES[kind.dtype], 1e-6)


MORE_LAYOUTS = {
    "ring": Layout(2, 2, {"strategy": "ring", "bucket_cap_mb": 0.01}),
    "ring over 4": Layout(4, 4, {"strategy": "ring", "bucket_cap_mb": 0.01}),
    "ring in a fixed order": Layout(4, 4, {"strategy": "ring", "fixed_order": True}),
    "ddp, recomputed": Layout(2, 2, {"strategy": "ddp", "activation_checkpointing": "full"}),
    "fsdp, recomputed by selection": Layout(2, 2, {"strategy": "fsdp", "activation_checkpointing": "selective"}),
    "tensor, every second layer recomputed": Layout(
        2, 1, {"tensor_parallel": 2, "activation_checkpointing": "every 2"}
    ),
    "ddp, activations on the host": Layout(2, 2, {"strategy": "ddp", "activation_offload": True}),
    "fsdp, activations on the host": Layout(2, 2, {"strategy": "fsdp", "activation_offload": True}),
}
"""Beside those of the matrix; layouts that only change how activations are kept."""
HALF = (
    *("ddp", "fsdp", "fsdp grad-op", "fsdp hybrid", "tensor", "pipeline 1f1b", "pipeline zero-bubble", "context"),
    *("fsdp x tensor", "fsdp x context", "pipeline x fsdp x tensor"),
)
PLAIN = {"ddp": Layout(2, 2, {"strategy": "ddp"}), "fsdp": Layout(2, 2, {"strategy": "fsdp"})}
SHARED: dict[str, dict[str, Any]] = {"ema": {"ema_decay": 0.8}, "lora": {"lora_rank": 4, "gradient_clipping": 0.01}}
WITHOUT_CLIPPING = {"gradient_clipping": None, "momentum": 0.0, "samples": 64, "loss_weighting": "samples"}
EVERY_STEP = {"strategy": "local-sgd", "sync_every": 1}
COMPILED = {
    name: Layout(layout.ranks, layout.data, {**layout.settings, "compile": True}) for name, layout in PLAIN.items()
}
TRANSFERS = [
    ("tensor", "fsdp"),
    ("pipeline 1f1b", "tensor"),
    ("fsdp grad-op", "pipeline x fsdp x tensor"),
    ("ddp", "tensor x pipeline"),
    ("expert", "fsdp x expert"),
    ("fsdp x tensor", "one process"),
    ("pipeline x fsdp x tensor", "the CPU"),
]
"""Layouts that save, and layouts that go on."""
ONE = {"one process": "", "the CPU": "cpu"}


def all_cases() -> list[tuple[int, dict[str, Case]]]:
    """Return the launches in their order: ranks, and their cases by name."""
    found, last = _matrix(), dict[str, Case]()
    for source, target in TRANSFERS:
        kind, name = Kind(LAYOUTS[source].model), f"{source} to {target}"
        found[LAYOUTS[source].ranks][f"{name}, saved"] = Case(partial(save, LAYOUTS[source], name, kind))
        layout = LAYOUTS.get(target, Layout(1, 1, model=kind.model))
        case = Case(partial(load, layout, name, kind, device=ONE.get(target, "")), TOLERANCES["float32"])
        (last if target in ONE else found[layout.ranks])[f"{name}, loaded"] = case
    for ranks in (2, 4, 8):
        found[ranks][f"own collectives on {ranks} ranks"] = Case(collectives, 1e-6)
    for name in COMPRESSORS[1:]:
        for strategy in ("ddp", "ring"):
            found[2][f"{strategy}, compressed by {name}"] = Case(partial(compressed, name, strategy))
    for strategy in ("local-sgd", "diloco"):
        found[2][f"{strategy} in rounds"] = Case(partial(rounds, strategy), 1e-10)
    found[2]["deepspeed, float32"] = Case(
        partial(equals_one, DEEPSPEED, Kind(), 4, "deepspeed"), 1e-5, needs="deepspeed", owns_group=True
    )
    return [(ranks, _in_order(cases)) for ranks, cases in [*found.items(), (1, last)]]


DEEPSPEED = Layout(2, 2, {"backend": "deepspeed", "zero_stage": 2})


def _in_order(cases: dict[str, Case]) -> dict[str, Case]:
    """Put those last that leave the common group, and those that take long."""
    return dict(sorted(cases.items(), key=lambda item: (item[1].owns_group, item[1].seconds)))
