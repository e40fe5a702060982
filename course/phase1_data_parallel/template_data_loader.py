"""Phase 1, part 1: distribute a dataset over ranks.

Write the three exercises, each marked with TODO. See guidelines.md. Check one: phalanx learn check shard-indices.
Run this file (python template_data_loader.py) to see what your functions return.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def shard_indices(
    size: int, rank: int, world: int, *, seed: int = 0, epoch: int = 0, shuffle: bool = True
) -> list[int]:
    """Return the indices of the samples that `rank` reads in `epoch`.

    1. The order: with `shuffle` a random permutation of 0 .. size - 1, without it 0, 1, 2, ... The permutation depends
       on `seed` and `epoch` alone: all ranks compute the same one, another epoch has another one, and the random state
       of the process (torch's, Python's) is neither used nor changed. seed + epoch will do as the number that seeds it.
    2. The padding: the order is continued from its own beginning until its length is a multiple of `world`. With 5
       samples in the order 3 1 4 0 2 and 4 ranks it becomes 3 1 4 0 2 3 1 4. With fewer samples than ranks the
       order is repeated as often as needed.
    3. The split: rank r takes the positions r, r + world, r + 2 * world, ...

    So each rank returns the same number of indices, and each sample is read at least once per epoch.
    """
    # TODO shard-indices: compute the order, pad it, and return the part of this rank.
    #   Hints, one at a time: phalanx learn hint shard-indices
    raise NotImplementedError("shard_indices")


@dataclass(frozen=True)
class Batch:
    """The part of one global batch that a rank computes."""

    indices: list[int]
    """Indices of the samples; may be empty."""
    weight: float
    """Share of this rank in the samples of the global batch: the sum over all ranks is 1."""


def shard_batches(order: Sequence[int], rank: int, world: int, *, global_batch: int) -> list[Batch]:
    """Return the batches of `rank`, one for each step of the epoch, without padding.

    Step s trains on the samples order[s * global_batch : (s + 1) * global_batch], all ranks together. The last global
    batch may be shorter. Inside each global batch every sample belongs to exactly one rank, and the numbers of samples
    of two ranks differ by at most one. Every rank returns the same number of batches, also when a part is empty: such
    a rank still has to take part in the all-reduce of that step.

    `weight` is (samples of this rank) / (samples of the global batch). With it, the sum over ranks of
    weight * (mean loss of the rank) is the mean loss of the global batch.
    """
    # TODO shard-batches: cut the order into global batches, and each global batch into the parts of the ranks.
    #   Hints, one at a time: phalanx learn hint shard-batches
    raise NotImplementedError("shard_batches")


class BackgroundLoader:
    """Load batches in a background thread while the caller computes.

    `load(indices)` returns one batch and may take long or raise. Each `iter(loader)` is a new pass over `batches`:

    - The batches arrive in the order of `batches`.
    - While the caller works on a batch, the thread loads the next ones, up to `depth` ahead: of the batches whose load
      has begun, at most `depth` have not been taken by the caller.
    - An exception of `load` is raised to the caller at the place of the batch that failed, after all batches before it,
      as the same exception object. No batch follows.
    - When the caller leaves the loop early (`break`, an exception, `close()` of the iterator), the thread ends as soon
      as the load that is under way returns. It never stays blocked.
    """

    def __init__(self, load: Callable[[list[int]], Tensor], batches: Sequence[list[int]], *, depth: int = 2) -> None:
        self.load = load
        self.batches = batches
        self.depth = depth

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the loaded batches in order."""
        # TODO load-in-background: load in a thread and hand the batches over in order.
        #   Hints, one at a time: phalanx learn hint load-in-background
        raise NotImplementedError("BackgroundLoader")


def load_slowly(indices: list[int]) -> Tensor:
    """Return a batch as a slow disk would deliver it."""
    time.sleep(0.02)
    return torch.tensor(indices, dtype=torch.float32)


def main() -> None:
    """Show the split of 10 samples over 3 ranks, and what loading in the background saves."""
    print("epoch 0, 10 samples, 3 ranks, padded:")
    for rank in range(3):
        print(f"  rank {rank}: {shard_indices(10, rank, 3, shuffle=False)}")
    first, second = (sorted(shard_indices(10, 0, 3, epoch=epoch)) for epoch in (0, 1))
    print("shuffled: rank 0 reads other samples in epoch 1:", first != second)
    print("global batches of 4, not padded:")
    for rank in range(3):
        parts = [f"{batch.indices} x {batch.weight:.2f}" for batch in shard_batches(range(10), rank, 3, global_batch=4)]
        print(f"  rank {rank}:", ", ".join(parts))
    loader = BackgroundLoader(load_slowly, [[index] for index in range(10)])
    started = time.perf_counter()
    for _batch in loader:
        time.sleep(0.02)
    seconds = time.perf_counter() - started
    print("10 batches, 0.02 s to load and 0.02 s to compute: in less than 0.35 s:", seconds < 0.35)


if __name__ == "__main__":
    try:
        main()
    except NotImplementedError as missing:
        print(f"{missing} is not written yet")
