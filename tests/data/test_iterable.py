"""Iterable data and ready-made batches: order, resume, worker processes, and ranks that agree on the end."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from waiting import LIMIT_SECONDS

from phalanx.data.loader import shard_loader
from phalanx.errors import DataError


class Counting(IterableDataset):
    """Yields 0, 1, 2, ... and, as the documentation of torch advises, only a part of it in a worker process."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        info = get_worker_info()
        yield from range(self.length) if info is None else range(info.id, self.length, info.num_workers)


class Shuffling(IterableDataset):
    """Shuffles with the process's generator, in a buffer as long as the epoch."""

    def __iter__(self):
        items = list(range(20))
        random.shuffle(items)
        for item in items:
            yield item, random.random()


class Sharded(Counting):
    """Knows how to cut itself, and yields 100 x shard + position to show who read what."""

    def __init__(self, length, step=1, first=0):
        super().__init__(length)
        self.step, self.first = step, first

    def shard(self, num_shards, index):
        return Sharded(self.length, num_shards, index)

    def __iter__(self):
        yield from range(self.first, self.length, self.step)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stream_that_shards_itself_at_some_number_of_ranks_fixes_it(ranks):
    def why(data, **options):
        return shard_loader(data, batch_size=2, dp_size=ranks, **options).fixed_ranks

    assert "shards itself" in why(Sharded(12))
    assert why(Sharded(12), in_order=True) == ""
    assert why(Counting(12)) == ""
    assert why(list(range(12))) == ""


class BatchesByIndex(Dataset):
    """A map-style data set whose items are whole batches of different sizes."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return torch.full((index + 1,), index)


def values(batch):
    return (batch[0] if isinstance(batch, list) else batch).tolist()


def read(loader, count=None):
    seen = []
    for batch in loader:
        seen.append((values(batch), loader.current.samples, loader.current.boundary))
        if len(seen) == count:
            break
    return seen


@pytest.mark.parametrize("workers", [0, 2])
def test_one_rank_reads_the_stream_in_order_once(workers):
    source = DataLoader(Counting(11), batch_size=2, num_workers=workers)
    loader = shard_loader(source, batch_size=None, accumulation=2)
    assert read(loader) == [
        ([0, 1], 2, False),
        ([2, 3], 2, True),
        ([4, 5], 2, False),
        ([6, 7], 2, True),
        ([8, 9], 2, False),
        ([10], 1, True),
    ]
    assert loader.current.scale == pytest.approx(1 / 3)
    assert loader.state_dict() == {"epoch": 0, "samples": 11}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_resumes_where_it_stopped_and_at_another_batch_size(workers):
    def make(batch_size, length=11):
        return shard_loader(DataLoader(Counting(length), batch_size=2, num_workers=workers), batch_size=batch_size)

    stopped = make(2)
    read(stopped, 2)
    assert stopped.state_dict()["samples"] == 4
    for batch_size, expected in [(2, [[4, 5], [6, 7], [8, 9], [10]]), (3, [[4, 5, 6], [7, 8, 9], [10]])]:
        resumed = make(batch_size)
        resumed.load_state_dict(stopped.state_dict())
        assert [batch for batch, *_ in read(resumed)] == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_shuffles_resumes_exactly_and_changes_with_the_epoch(workers):
    def make():
        source = DataLoader(Shuffling(), batch_size=3, num_workers=workers, persistent_workers=workers > 0)
        return shard_loader(source, batch_size=None, seed=4)

    whole, stopped, resumed = make(), make(), make()
    expected = [[part.tolist() for part in batch] for batch in whole]
    read(stopped, 3)
    resumed.load_state_dict(stopped.state_dict())
    assert [[part.tolist() for part in batch] for batch in resumed] == expected[3:]
    following = [[part.tolist() for part in batch] for batch in whole]
    assert sorted(sample for batch in following for sample in batch[0]) == list(range(20))
    assert following != expected
    for loader in (whole, stopped, resumed):
        loader.close()


def test_lengths_are_unknown_unless_the_stream_has_one():
    loader = shard_loader(DataLoader(Counting(5), batch_size=2), batch_size=None)
    assert loader.steps_per_epoch is None
    assert loader.num_samples is None
    with pytest.raises(TypeError, match="unknown"):
        len(loader)
    Telling = type("Telling", (Counting,), {"__len__": lambda self: self.length})
    loader = shard_loader(Telling(11), batch_size=2, accumulation=2)
    assert (len(loader), loader.steps_per_epoch, loader.num_samples) == (len(list(loader)), 3, 11)


def test_drop_last_drops_the_incomplete_step_of_a_stream():
    loader = shard_loader(DataLoader(Counting(11), batch_size=2, drop_last=True), batch_size=None, accumulation=2)
    assert [batch for batch, *_ in read(loader)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.raises(DataError, match="global batch of 12"):
        list(shard_loader(Counting(11), batch_size=12, drop_last=True))


def test_an_empty_stream_is_an_error():
    with pytest.raises(DataError, match="empty"):
        list(shard_loader(Counting(0), batch_size=2))


def test_a_list_of_batches_is_read_unchanged():
    batches = [torch.tensor([0, 1, 2]), torch.tensor([3])]
    loader = shard_loader(batches, batch_size=8, accumulation=2)
    assert read(loader) == [([0, 1, 2], 3, False), ([3], 1, True)]
    assert loader.notes == ["batch_size=8 is not used: the data makes the batches, and each goes whole to one rank."]
    loader = shard_loader(batches, batch_size=None)
    loader.load_state_dict({"epoch": 0, "samples": 3})
    assert read(loader) == [([3], 1, True)]


def test_a_loader_that_overrides_iter_keeps_it():
    class Negating(DataLoader):
        def __iter__(self):
            return (-batch for batch in super().__iter__())

    loader = shard_loader(Negating(torch.arange(4), batch_size=2), batch_size=None)
    assert read(loader) == [([0, -1], 2, True), ([-2, -3], 2, True)]
    assert "Negating overrides __iter__" in loader.notes[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_set_of_ready_made_batches_is_counted_by_their_sizes(workers):
    source = DataLoader(BatchesByIndex(), batch_size=None, num_workers=workers)
    loader = shard_loader(source, batch_size=None, accumulation=2)
    assert [samples for _, samples, _ in read(loader)] == [1, 2, 3, 4, 5]
    stopped, resumed = (shard_loader(source, batch_size=None, accumulation=2) for _ in range(2))
    read(stopped, 3)
    resumed.load_state_dict(stopped.state_dict())
    assert [batch[0] for batch, *_ in read(resumed)] == [2, 3, 4]


def test_several_ranks_without_a_group_are_refused():
    with pytest.raises(DataError, match=r"torch\.distributed"):
        list(shard_loader(Counting(5), batch_size=2, dp_size=2))


# What follows runs on two real ranks. Each scenario returns what the rank saw.


def read_shard(rank, workers=0, length=11, batch_size=2, accumulation=1, state=None, stop=None, **options):
    source = DataLoader(Counting(length), batch_size=batch_size, num_workers=workers)
    loader = shard_loader(source, batch_size=None, dp_rank=rank, dp_size=2, accumulation=accumulation, **options)
    if state is not None:
        loader.load_state_dict(state)
    seen = [(*each, loader.current.global_samples) for each in read(loader, stop)]
    return [(values, samples) for values, samples, *_ in seen], loader.state_dict()


def sharded(rank, stop=None, state=None):
    loader = shard_loader(Sharded(9), batch_size=2, dp_rank=rank, dp_size=2, training=True)
    if state is not None:
        loader.load_state_dict(state)
    return [(values, samples) for values, samples, _ in read(loader, stop)], loader.state_dict()


def wrong_layout(rank):
    loader = shard_loader(Sharded(9), batch_size=4, dp_rank=rank, dp_size=2)
    try:
        loader.load_state_dict({"epoch": 0, "samples": 4, "micro_steps": 1, "shards": [2, 0, 2]})
    except DataError as error:
        return str(error)
    return None


SCENARIOS = {
    "uneven": (read_shard, {}),
    "workers": (read_shard, {"workers": 2}),
    "accumulated": (read_shard, {"accumulation": 2, "length": 14}),
    "short": (read_shard, {"length": 1}),
    "stopped": (read_shard, {"stop": 1}),
    "resumed": (read_shard, {"state": {"epoch": 0, "samples": 4}}),
    "dropped": (read_shard, {"drop_last": True}),
    "sharded": (sharded, {}),
    "sharded_stopped": (sharded, {"stop": 1}),
    "sharded_resumed": (sharded, {"state": {"epoch": 0, "samples": 4, "micro_steps": 1, "shards": [2, 0, 2]}}),
    "wrong_layout": (wrong_layout, {}),
}


def run_scenarios(rank, store, answers):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    results = {name: scenario(rank, **options) for name, (scenario, options) in SCENARIOS.items()}
    answers.put((rank, results))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    """Run every scenario in one pair of processes; return its results as {name: [rank 0's, rank 1's]}."""
    context = mp.get_context("fork")
    answers = context.SimpleQueue()
    store = str(tmp_path_factory.mktemp("store") / "store")
    processes = [context.Process(target=run_scenarios, args=(rank, store, answers)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=LIMIT_SECONDS)
    codes = [process.exitcode for process in processes]
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    assert codes == [0, 0]
    by_rank = dict(answers.get() for _ in processes)
    answers.close()
    return {name: [by_rank[rank][name] for rank in range(2)] for name in SCENARIOS}


def batches(results):
    return [seen for seen, _ in results]


@pytest.mark.parametrize("name", ["uneven", "workers"])
def test_blocks_are_distributed_in_turn_and_a_rank_without_data_gets_a_placeholder(on_two_ranks, name):
    results = on_two_ranks[name]
    assert batches(results) == [
        [([0, 1], 2), ([4, 5], 2), ([8, 9], 2)],
        [([2, 3], 2), ([6, 7], 2), ([10], 1)],
    ]
    assert [state for _, state in results] == [{"epoch": 0, "samples": 11}] * 2


def test_accumulation_over_a_stream_ends_together(on_two_ranks):
    assert batches(on_two_ranks["accumulated"]) == [
        [([0, 1], 2), ([4, 5], 2), ([8, 9], 2), ([12, 13], 2)],
        [([2, 3], 2), ([6, 7], 2), ([10, 11], 2), ([10, 11], 0)],
    ]


def test_a_rank_that_never_had_a_batch_gets_a_placeholder(on_two_ranks):
    assert batches(on_two_ranks["short"]) == [[([0], 1)], [([0], 0)]]


def test_a_stream_resumes_on_all_ranks(on_two_ranks):
    assert [state["samples"] for _, state in on_two_ranks["stopped"]] == [4, 4]
    assert batches(on_two_ranks["resumed"]) == [[([4, 5], 2), ([8, 9], 2)], [([6, 7], 2), ([10], 1)]]


def test_drop_last_is_decided_together(on_two_ranks):
    assert batches(on_two_ranks["dropped"]) == [[([0, 1], 2), ([4, 5], 2)], [([2, 3], 2), ([6, 7], 2)]]


def test_a_data_set_with_shard_shards_itself(on_two_ranks):
    assert batches(on_two_ranks["sharded"]) == [
        [([0, 2], 2), ([4, 6], 2), ([8], 1)],
        [([1, 3], 2), ([5, 7], 2), ([5, 7], 0)],
    ]
    saved = on_two_ranks["sharded_stopped"][0][1]
    assert saved == {"epoch": 0, "samples": 4, "micro_steps": 1, "shards": [2, 0, 2]}
    assert batches(on_two_ranks["sharded_resumed"]) == [seen[1:] for seen in batches(on_two_ranks["sharded"])]
    assert all("in the same layout only" in message for message in on_two_ranks["wrong_layout"])
