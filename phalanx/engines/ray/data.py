"""Ray data sets as batches of tensors: each rank reads the shard that Ray assigns to it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from phalanx.errors import DataError, UsageError
from phalanx.world.env import read_rank_env

_TARGETS = ("y", "label", "labels", "target", "targets")


def is_ray_dataset(data: Any) -> bool:
    """Whether this is a data set of Ray Data; Ray is not imported to find out."""
    module: Any = sys.modules.get("ray.data")
    return module is not None and isinstance(data, module.Dataset)


def datasets_of(*sources: Any) -> dict[str, Any]:
    """Return the Ray data sets among what a task reads, by the names under which the ranks will find them."""
    return {source.name: source.dataset for source in sources if isinstance(source, RayData)}


class RayData:
    """A Ray data set in the trainer's process, and in a rank the part of it that the rank reads.

    Batches are dicts of tensors by column; two columns of which the second is called y, label(s) or target(s) become
    (inputs, targets).
    """

    def __init__(self, dataset: Any, name: str, batch_size: int | None) -> None:
        if batch_size is None:
            raise UsageError("a Ray data set has no batch size.", hint="Set batch_size: samples per rank and step.")
        if dataset is not None:
            dataset.context.enable_progress_bars = False  # the run shows its own progress
        self.dataset = dataset
        self.name = name
        self.batch_size = batch_size

    def __reduce__(self) -> tuple[Any, ...]:
        # Ray brings the data to the ranks itself: there, `name` is enough to find them.
        return (_ShardedByRay if self.name == "train" else RayData), (None, self.name, self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._source().iter_torch_batches(batch_size=self.batch_size, device="cpu"):
            names = list(batch)
            yield (batch[names[0]], batch[names[1]]) if len(names) == 2 and names[1] in _TARGETS else batch

    def _source(self) -> Any:
        if self.dataset is not None:
            return self.dataset
        import ray.train

        shard: Any = ray.train.get_dataset_shard(self.name)
        if shard is None:
            raise DataError(f"Ray did not bring the data set '{self.name}' to this rank.")
        return shard


class _ShardedByRay(RayData):
    """The training shard of a rank: with `shard`, the loader does not pick every n-th batch itself."""

    def shard(self, num_shards: int, index: int) -> _ShardedByRay:
        """Return this rank's part; Ray shards by rank, so every rank must see other samples."""
        env = read_rank_env()
        if env is not None and (num_shards != env.world_size or index != env.rank):
            raise UsageError(
                f"Ray Data shards samples over {env.world_size} ranks, but this layout has {num_shards} parts.",
                hint="Use a torch data set with tensor, pipeline or context parallelism.",
            )
        return self
