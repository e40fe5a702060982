"""The adviser: for a link, a model and a step time, which compressor pays and which loses. Arithmetic, nothing else.

A step computes for a while and sends for a while. Gradients travel during backward, about two thirds of the computing,
and what does not fit behind it is waited for. A compressor shortens the sending and takes time of its own; that time is
measured (`measure.py`), and counts as computing, since the courier needs the processor for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.comm.compress.base import ring_bytes
from phalanx.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

BACKWARD_SHARE = 2 / 3
"""Backward computes two products where forward computes one."""
WORTH_IT = 0.05
"""Less than this share of a step is not worth a coarser gradient."""


@dataclass(frozen=True)
class Link:
    """What a rank can send: bytes a second, and seconds until a message's first byte is there."""

    bytes_per_second: float
    latency_s: float = 0.0


@dataclass(frozen=True)
class Cost:
    """What a compressor was measured to do: bytes sent for each byte of gradient, gradient bytes a second, messages."""

    name: str
    sent_share: float
    bytes_per_second: float
    messages: int = 1


@dataclass(frozen=True)
class Prediction:
    """One compressor's step, and whether it is worth having."""

    name: str
    step_s: float
    send_s: float
    own_s: float
    exposed_s: float
    verdict: str
    """"pays", "even" or "loses"."""
    reason: str


def advise(
    link: Link, *, model_bytes: int, compute_s: float, ranks: int, costs: Iterable[Cost], buckets: int = 1
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


def _check(link: Link, model_bytes: int, compute_s: float, ranks: int) -> None:
    wrong = {
        "a link of bytes_per_second": link.bytes_per_second,
        "model_bytes": model_bytes,
        "compute_s": compute_s,
    }
    for name, value in wrong.items():
        if not value > 0:
            raise UsageError(f"advise: {name} = {value}: must be greater than 0.")
    if ranks < 2:
        raise UsageError(f"advise: ranks = {ranks}: one rank sends nothing, so there is nothing to compress.")


def _predict(
    cost: Cost, link: Link, model_bytes: int, compute_s: float, ranks: int, buckets: int, plain: Prediction
) -> Prediction:
    own_s = model_bytes / cost.bytes_per_second
    send_s = cost.sent_share * model_bytes / link.bytes_per_second
    send_s += cost.messages * (ranks - 1) * link.latency_s * buckets
    busy = compute_s + own_s
    # While the courier sends it does not compress: both share its time behind backward.
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


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms"
