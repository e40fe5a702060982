"""What checks of the ranks find: replicas whose weights differ, and ranks that are much slower than the others."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """A suspicion about some ranks, and its reason; what follows from it is up to the settings."""

    kind: Literal["corruption", "straggler"]
    ranks: tuple[int, ...]
    why: str


def odd_replicas(hashes: Sequence[int]) -> Finding | None:
    """Compare the hashes of replicas that must be equal, by rank; name those that differ from the majority.

    Without a majority (two ranks that differ, say) all of them are named.
    """
    counts = Counter(hashes).most_common()
    if len(counts) == 1:
        return None
    (value, most), total = counts[0], len(hashes)
    if 2 * most > total:
        odd = tuple(rank for rank, each in enumerate(hashes) if each != value)
        return Finding("corruption", odd, f"the weights of {_named(odd)} differ from those of the {most} other ranks")
    every = tuple(range(total))
    return Finding("corruption", every, f"the weights of {_named(every)} differ, and no majority agrees")


def slow_ranks(seconds: Sequence[float], factor: float) -> Finding | None:
    """Compare each rank's own time per step; name those that take more than `factor` times the median of the others."""
    slow = []
    for rank, own in enumerate(seconds):
        others = [each for other, each in enumerate(seconds) if other != rank]
        if others and own > factor * statistics.median(others):
            slow.append(rank)
    if not slow:
        return None
    usual = statistics.median(each for rank, each in enumerate(seconds) if rank not in slow)
    times = ", ".join(f"{seconds[rank] * 1000:.3g} ms" for rank in slow)
    verb = "takes" if len(slow) == 1 else "take"
    why = f"{_named(tuple(slow))} {verb} {times} per step without waiting, the others {usual * 1000:.3g} ms"
    return Finding("straggler", tuple(slow), why)


def balanced_shares(seconds: Sequence[float], shares: Sequence[int], most: int) -> tuple[int, ...]:
    """Return how many samples each rank should take for all to be equally long busy, at most `most`, at least one.

    `seconds`: each rank's own time with the present `shares`; the sum of the shares stays the same.
    """
    total, speeds = sum(shares), [share / max(own, 1e-9) for own, share in zip(seconds, shares, strict=True)]
    wanted = [min(float(most), max(1.0, total * speed / sum(speeds))) for speed in speeds]
    found = [int(share) for share in wanted]
    while (missing := total - sum(found)) != 0:
        change = 1 if missing > 0 else -1
        able = [rank for rank, share in enumerate(found) if (share < most if change > 0 else share > 1)]
        found[max(able, key=lambda rank: change * (wanted[rank] - found[rank]))] += change
    return tuple(found)


def _named(ranks: tuple[int, ...]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
