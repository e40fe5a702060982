"""Predict for a link, a model and a step time which compressor pays; measure what compressors cost here.

A step computes for some time and sends for some time. Gradients are sent during backward, about two thirds of the
computing, and the step waits for the rest of the sending. A compressor shortens the sending and takes time itself; that
time is measured in one process that stands for all ranks (their gradients are equal, so nothing is sent), and counts as
computing, since the communication thread needs the processor for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.comm.compress import build_compressor, ring_bytes
from phalanx.comm.exchange import Bucket, Exchange
from phalanx.config import DistributedConfig
from phalanx.errors import UsageError
from phalanx.observe.format import size, table

BACKWARD_SHARE = 2 / 3
"""Backward computes two products where forward computes one."""
WORTH_IT = 0.05
"""Less than this share of a step is not worth a coarser gradient."""


@dataclass(frozen=True)
class LinkSpeed:
    """What a rank can send: bytes per second, and seconds until a message's first byte arrives."""

    bytes_per_second: float
    latency_s: float = 0.0


@dataclass(frozen=True)
class Cost:
    """Measured: bytes sent per byte of gradient, gradient bytes per second, messages."""

    name: str
    sent_share: float
    bytes_per_second: float
    messages: int = 1


@dataclass(frozen=True)
class Prediction:
    """One compressor's step, and whether it pays."""

    name: str
    step_s: float
    send_s: float
    own_s: float
    exposed_s: float
    verdict: str
    """"pays", "even" or "loses"."""
    reason: str


def advise(
    link: LinkSpeed, *, model_bytes: int, compute_s: float, ranks: int, costs: Iterable[Cost], buckets: int = 1
) -> list[Prediction]:
    """Predict the step of each compressor and of none, the fastest first.

    `model_bytes` are those of the gradients, `compute_s` a step's time without any sending, `costs` what `measure`
    found for this number of ranks.
    """
    _check(link, model_bytes, compute_s, ranks)
    plain_s = ring_bytes(model_bytes, ranks) / link.bytes_per_second + 2 * (ranks - 1) * link.latency_s * buckets
    exposed = max(0.0, plain_s - BACKWARD_SHARE * compute_s)
    plain = Prediction("none", compute_s + exposed, plain_s, 0.0, exposed, "even", _plain_reason(plain_s, exposed))
    found = [_predict(cost, link, model_bytes, compute_s, ranks, buckets, plain) for cost in costs]
    return sorted([plain, *found], key=lambda prediction: prediction.step_s)


def _check(link: LinkSpeed, model_bytes: int, compute_s: float, ranks: int) -> None:
    wrong = {"a link of bytes_per_second": link.bytes_per_second, "model_bytes": model_bytes, "compute_s": compute_s}
    for name, value in wrong.items():
        if not value > 0:
            raise UsageError(f"advise: {name} = {value}: must be greater than 0.")
    if ranks < 2:
        raise UsageError(f"advise: ranks = {ranks}: one rank sends nothing, so there is nothing to compress.")


def _predict(
    cost: Cost, link: LinkSpeed, model_bytes: int, compute_s: float, ranks: int, buckets: int, plain: Prediction
) -> Prediction:
    own_s = model_bytes / cost.bytes_per_second
    send_s = cost.sent_share * model_bytes / link.bytes_per_second
    send_s += cost.messages * (ranks - 1) * link.latency_s * buckets
    busy = compute_s + own_s
    # The communication thread does not compress while it sends: both share its time behind backward.
    exposed = max(0.0, send_s - BACKWARD_SHARE * compute_s)
    step_s = busy + exposed
    gain = plain.step_s - step_s
    verdict = "even" if abs(gain) < WORTH_IT * plain.step_s else "pays" if gain > 0 else "loses"
    return Prediction(cost.name, step_s, send_s, own_s, exposed, verdict, _reason(plain, own_s, send_s, exposed))


def _plain_reason(send_s: float, exposed: float) -> str:
    if exposed == 0:
        return f"{_ms(send_s)} of sending fit behind backward"
    return f"{_ms(send_s)} of sending, {_ms(exposed)} of it waited for"


def _reason(plain: Prediction, own_s: float, send_s: float, exposed: float) -> str:
    if plain.exposed_s == 0:
        return f"sending was hidden already, and compressing takes {_ms(own_s)}"
    saved = plain.exposed_s - exposed
    return f"waits {_ms(abs(saved))} {'less' if saved >= 0 else 'more'}, compresses for {_ms(own_s)}"


def advice(
    name: str, link: LinkSpeed, found: Sequence[Prediction], *, compute_s: float, model_bytes: int, ranks: int
) -> str:
    """Return the adviser's answer for one model and one link as a table."""
    rate = f"{link.bytes_per_second * 8 / 1e9:.3g} Gb/s, {link.latency_s * 1e6:.0f} us"
    title = f"{name}: {size(model_bytes)} of gradients, {compute_s * 1000:.1f} ms computing, {ranks} ranks, {rate}"
    rows: list[tuple[str, ...]] = [("compressor", "step ms", "sends ms", "compresses ms", "verdict", "why")]
    for item in found:
        times = (f"{seconds * 1000:.2f}" for seconds in (item.step_s, item.send_s, item.own_s))
        rows.append((item.name, *times, item.verdict if item.name != "none" else "-", item.reason))
    return f"{title}\n{table(rows)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms"


_ROUNDS = 3
_SETTINGS_OF = {"topk": ("compression_ratio",), "randomk": ("compression_ratio",), "powersgd": ("powersgd_rank",)}
"""The settings of single compressors; all have the warm-up."""


class EchoExchange(Exchange):
    """An exchange of ranks that all hold the same tensor: nothing is sent, everything is counted."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.messages = 0

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        """Add up a tensor over the ranks, in place."""
        self._count(2 * (self.size - 1) * tensor.nbytes // self.size, 2)
        if op != "mean":
            tensor.mul_(self.size)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, stacked by rank."""
        self._count((self.size - 1) * tensor.nbytes, 1)
        return tensor.expand(self.size, *tensor.shape).contiguous()

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Send row r to rank r; return the rows that were sent here."""
        self._count((self.size - 1) * tensor.nbytes // self.size, 1)
        return tensor[:1].expand_as(tensor).contiguous()

    def _count(self, sent: int, messages: int) -> None:
        self.sent_bytes += sent
        self.messages += messages


def settings_of(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that a compressor uses: the config raises for the others."""
    own = () if name == "none" else (*_SETTINGS_OF.get(name, ()), "compression_warmup")
    return {key: value for key, value in settings.items() if key in own}


def measure_costs(
    names: Iterable[str], shapes: Sequence[tuple[int, ...]], ranks: int, device: str = "cpu", **settings: Any
) -> list[Cost]:
    """Measure compressors on gradients of these shapes, as the config's settings have them."""
    return [_measure(name, shapes, ranks, torch.device(device), settings) for name in names if name != "none"]


def _measure(
    name: str, shapes: Sequence[tuple[int, ...]], ranks: int, device: torch.device, settings: dict[str, Any]
) -> Cost:
    config = DistributedConfig(**{**settings_of(name, settings), "compression": name})
    named = [(str(number), torch.zeros(shape, requires_grad=True)) for number, shape in enumerate(shapes)]
    compressor = build_compressor(config, named)
    gradient = torch.randn(sum(parameter.numel() for _, parameter in named), device=device)
    times = []
    for _ in range(_ROUNDS + 1):  # the first makes residuals and factors
        flat = gradient.clone()
        bucket = Bucket(0, flat, tuple(key for key, _ in named), _views(flat, shapes))
        exchange = EchoExchange(ranks)
        _synchronize(device)
        begin = time.perf_counter()
        compressor.reduce(bucket, exchange)
        _synchronize(device)
        times.append(time.perf_counter() - begin)
    nbytes = gradient.nbytes
    return Cost(name, exchange.sent_bytes / nbytes, nbytes / sorted(times[1:])[_ROUNDS // 2], exchange.messages)


def _views(flat: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> tuple[torch.Tensor, ...]:
    pieces = torch.split(flat, [torch.Size(shape).numel() for shape in shapes])
    return tuple(piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
