"""What a benchmark measures, checked before any rank starts. No torch here."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass

from phalanx.errors import UsageError, unknown_name
from phalanx.recipes.imports import check_import, extend_path, is_import_path

ALGORITHMS_OF = {
    "all_reduce": (
        "ring",
        "tree",
        "halving-doubling",
        "hierarchical",
        "fixed-order",
        "gloo",
        "shm",
        "shm-copy",
        "copy",
        "nccl",
    ),
    "reduce_scatter": ("ring", "gloo", "shm", "nccl"),
    "all_gather": ("ring", "gloo", "shm", "nccl"),
    "broadcast": ("tree", "gloo", "shm", "nccl"),
    "reduce": ("tree", "gloo", "nccl"),
    "gather": ("direct", "gloo", "nccl"),
    "scatter": ("direct", "gloo", "nccl"),
    "all_to_all": ("direct", "gloo", "shm", "nccl"),
}
"""What can be measured: the collectives of this package first, then gloo, shared memory and nccl. All-reduce by `shm`
is of a tensor in the shared pages; by `shm-copy` it is copied in and out. `copy` is not a collective, but their lower
bound: every rank copies its tensor to other memory."""

DTYPE_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1, "int32": 4, "int64": 8}
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
OPS = ("sum", "mean", "min", "max", "prod")

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"(\d+)([KMG]?)I?B?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """One benchmark: every algorithm on every size."""

    op: str
    algos: tuple[str, ...]
    sizes: tuple[int, ...]
    dtype: str = "float32"
    redop: str = "sum"
    iters: int | None = None
    warmup: int = 2
    ranks_per_host: int | None = None
    p2p: bool = False
    ranks_per_gpu: int = 1
    """Over 1: ranks share GPUs, and the times of nccl say nothing about several."""

    def __post_init__(self) -> None:
        if self.op not in ALGORITHMS_OF:
            raise UsageError(unknown_name("collective", self.op, ALGORITHMS_OF))
        for algo in self.algos:
            _check_algorithm(self.op, algo)
        if self.dtype not in DTYPE_BYTES:
            raise UsageError(unknown_name("dtype", self.dtype, DTYPE_BYTES))
        if self.redop not in OPS:
            raise UsageError(unknown_name("reduction", self.redop, OPS))
        if self.redop == "mean" and "int" in self.dtype and self.op in REDUCING:
            raise UsageError(f"--redop mean of {self.dtype}", hint="A mean needs a dtype with fractions, or take sum.")
        for name, value, least in (("--iters", self.iters, 1), ("--warmup", self.warmup, 0)):
            if value is not None and value < least:
                raise UsageError(f"{name} is {value}", hint=f"It must be {least} or more.")

    def iterations(self, nbytes: int) -> int:
        """Return how often a size is timed: `iters`, or fewer times for larger sizes."""
        if self.iters is not None:
            return self.iters
        return 100 if nbytes <= 1 << 20 else 20 if nbytes <= 16 << 20 else 5

    def to_json(self) -> str:
        """Write the plan for the ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> BenchPlan:
        """Read what `to_json` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "algos": tuple(fields["algos"]), "sizes": tuple(fields["sizes"])})


def _check_algorithm(op: str, algo: str) -> None:
    if algo in ALGORITHMS_OF[op]:
        return
    if is_import_path(algo):
        extend_path([os.getcwd()])
        check_import(algo, "--algo")
        return
    others = [name for name, names in ALGORITHMS_OF.items() if algo in names]
    if others:
        allowed = ", ".join(ALGORITHMS_OF[op])
        raise UsageError(f"{op} has no algorithm '{algo}' ({', '.join(others)} has).", hint=f"Allowed: {allowed}.")
    raise UsageError(unknown_name("algorithm", algo, ALGORITHMS_OF[op], of=op))


def parse_algorithms(text: str | None, op: str, device: str = "cpu") -> tuple[str, ...]:
    """Read `ring,tree,gloo`; nothing: what every machine can do, or with GPUs nccl."""
    if device not in ("cpu", "cuda"):
        raise UsageError(unknown_name("device", device, ("cpu", "cuda")))
    if text is None and device == "cuda":
        return ("nccl",) if op in ALGORITHMS_OF else ()
    if text is None:
        usual = ("ring", "tree", "direct", "gloo", "shm")
        return tuple(name for name in ALGORITHMS_OF.get(op, ()) if name in usual)
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise UsageError(f"--algo '{text}' names no algorithm", hint="Write --algo ring,gloo")
    return tuple(dict.fromkeys(names))


def parse_size(text: str) -> int:
    """Read `64K`, `256M`, `1G` or bytes."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or int(match[1]) == 0:
        raise UsageError(f"'{text}' is not a size", hint="Write bytes with K, M or G, such as 64K or 256M.")
    return int(match[1]) * _UNITS[match[2].upper()]


def parse_sizes(text: str) -> tuple[int, ...]:
    """Read `1K:256M` (each size twice the one before), `1K:256M:4` (four times), or `1K,64K,4M`."""
    if ":" not in text:
        return tuple(parse_size(part) for part in text.split(","))
    first, last, *rest = text.split(":")
    factor = int(rest[0]) if rest and rest[0].isdecimal() else 2
    low, high = parse_size(first), parse_size(last)
    if len(rest) > 1 or (rest and not rest[0].isdecimal()) or factor < 2 or low > high:
        raise UsageError(f"'{text}' is not a range of sizes", hint="Write smallest:largest[:factor], as 1K:256M:4.")
    sizes = [low]
    while sizes[-1] * factor <= high:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes)


def bus_factor(op: str, ranks: int) -> float:
    """Return bus bandwidth / algorithm bandwidth, as in nccl-tests: the load of an ideal link.

    An all-reduce moves every byte 2 (n-1)/n times over each rank's link, by any algorithm; those that only distribute
    or only collect move it (n-1)/n times; a broadcast and a reduce once.
    """
    if op in ("broadcast", "reduce"):
        return 1.0
    share = (ranks - 1) / ranks
    return 2 * share if op == "all_reduce" else share


def element_count(op: str, nbytes: int, dtype: str, ranks: int) -> int:
    """Return the elements of the whole tensor: at least one, and one share per rank where the collective splits it."""
    count = max(1, nbytes // DTYPE_BYTES[dtype])
    if op in ("all_reduce", "broadcast", "reduce"):
        return count
    return max(ranks, count // ranks * ranks)


PLAN_FILE, RESULT_FILE = "plan.json", "result.json"
