"""The sharded loader on map-style data: coverage, weights, kept options, notes and errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from phalanx.data.fetch import BatchFetcher, BatchRequest
from phalanx.data.loader import MicroInfo, shard_loader
from phalanx.errors import DataError, UsageError


def numbered(length):
    return TensorDataset(torch.arange(length).float().unsqueeze(1), torch.arange(length))


def loaders(source, dp_size, **options):
    return [shard_loader(source, dp_rank=rank, dp_size=dp_size, **options) for rank in range(dp_size)]


def real_samples(ranks):
    """Read an epoch on all ranks in lockstep; return the samples that count, step by step."""
    steps = []
    for batches in zip(*ranks, strict=True):
        seen = [batch[1].tolist() if rank.current.samples else [] for rank, batch in zip(ranks, batches, strict=True)]
        steps.append([sample for part in seen for sample in part])
    return steps


def flat(steps):
    return [sample for step in steps for sample in step]


@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_same_global_batches_at_any_number_of_ranks(dp_size):
    reference = real_samples(loaders(numbered(40), 1, batch_size=6, seed=5))
    assert real_samples(loaders(numbered(40), dp_size, batch_size=6 // dp_size, seed=5)) == reference
    assert flat(reference) != sorted(flat(reference))


def test_epochs_differ_repeat_and_advance_automatically():
    (loader,) = loaders(numbered(30), 1, batch_size=8)
    zero, one = real_samples([loader]), real_samples([loader])
    assert zero != one
    loader.set_epoch(0)
    assert real_samples([loader]) == zero
    loader.set_epoch(1)
    assert real_samples([loader]) == one


def test_gradient_is_that_of_the_global_mean_for_any_split():
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(11, 3), torch.randn(11))

    def gradients(dp_size, batch_size, accumulation):
        weight, steps = torch.zeros(3, requires_grad=True), []
        ranks = loaders(
            DataLoader(data, batch_size=1), dp_size, batch_size=batch_size, accumulation=accumulation, training=True
        )
        for batches in zip(*ranks, strict=True):
            for rank, (inputs, targets) in zip(ranks, batches, strict=True):
                loss = (inputs @ weight - targets).square().mean()
                (loss * rank.current.scale / dp_size).backward()
            if ranks[0].current.boundary:
                steps.append(weight.grad.clone())
                weight.grad = None
        return torch.stack(steps)

    reference = gradients(1, 8, 1)
    assert len(reference) == 2
    for split in [(2, 4, 1), (4, 2, 1), (2, 2, 2), (1, 2, 4)]:
        torch.testing.assert_close(gradients(*split), reference)


def test_evaluation_counts_every_sample_once_in_order():
    source = DataLoader(numbered(10), batch_size=4, shuffle=True, drop_last=True)
    ranks = loaders(source, 4, batch_size=2, training=False, accumulation=3)
    steps = real_samples(ranks)
    assert flat(steps) == list(range(10))
    assert [len(rank) for rank in ranks] == [2, 2, 2, 2]
    assert real_samples(ranks) == steps


def test_lengths_and_drop_last():
    source = DataLoader(numbered(21), batch_size=3, shuffle=True, drop_last=True)
    (loader,) = loaders(source, 1, batch_size=None, accumulation=2)
    assert (len(loader), loader.steps_per_epoch, loader.num_samples) == (6, 3, 18)
    assert len(list(loader)) == 6
    (keeping,) = loaders(source, 1, batch_size=None, accumulation=2, drop_last=False)
    assert (len(keeping), keeping.steps_per_epoch, keeping.num_samples) == (7, 4, 21)


def test_notes_name_what_was_replaced():
    sampler = DistributedSampler(numbered(20), num_replicas=2, rank=1, shuffle=False)
    source = DataLoader(numbered(20), batch_size=8, sampler=sampler)
    ranks = loaders(source, 2, batch_size=5)
    assert ranks[0].notes == [
        "batch_size=5 per rank replaces the DataLoader's 8.",
        "DistributedSampler replaced: Phalanx shards the data itself.",
    ]
    assert flat(real_samples(ranks)) == list(range(20))


def test_a_global_batch_larger_than_the_data_is_one_step_with_a_note():
    ranks = loaders(numbered(5), 2, batch_size=4)
    assert [len(step) for step in real_samples(ranks)] == [5]
    assert "5 samples, a global batch is 4 x 2 ranks = 8" in ranks[0].notes[0]


def test_a_batch_larger_than_the_data_is_refused_in_training_only():
    with pytest.raises(DataError, match="batch_size = 32 is larger than the data set of 5 samples"):
        shard_loader(numbered(5), batch_size=32)
    (loader,) = loaders(numbered(5), 1, batch_size=32, training=False)
    assert [len(step) for step in real_samples([loader])] == [5]


def test_errors_have_a_hint():
    with pytest.raises(DataError, match="empty"):
        shard_loader(numbered(0), batch_size=2)
    with pytest.raises(DataError) as caught:
        shard_loader(numbered(10), batch_size=8, dp_size=2, drop_last=True)
    assert "10 samples, a global batch is 8 x 2 ranks = 16" in str(caught.value)
    assert "Lower batch_size to 5 or set drop_last=False." in str(caught.value)
    with pytest.raises(DataError, match="read only once"):
        shard_loader(iter([torch.ones(2)]), batch_size=None)
    with pytest.raises(DataError, match="cannot read training data from int"):
        shard_loader(3, batch_size=1)
    with pytest.raises(UsageError, match="batch_size is not known"):
        shard_loader(numbered(4), batch_size=None)
    with pytest.raises(UsageError, match="dp_rank=2"):
        shard_loader(numbered(4), batch_size=1, dp_rank=2, dp_size=2)
    with pytest.raises(UsageError, match="sharded already"):
        shard_loader(shard_loader(numbered(4), batch_size=1), batch_size=1)


class RaggedStream(IterableDataset):
    def __iter__(self):
        return iter([torch.ones(2), torch.ones(3)])


@pytest.mark.parametrize("data", [[torch.ones(2), torch.ones(3)], RaggedStream()])
def test_samples_of_different_shapes_are_refused_with_what_to_do(data):
    (loader,) = loaders(DataLoader(data, batch_size=2), 1, batch_size=2)
    with pytest.raises(DataError, match=r"(?s)different shapes: .* got \[[23]\] .*give a DataLoader with a collate_fn"):
        list(loader)


@pytest.mark.parametrize(
    "make",
    [
        lambda: WeightedRandomSampler(torch.ones(20), 30),
        lambda: WeightedRandomSampler(torch.ones(20), 30, generator=torch.Generator().manual_seed(4)),
        lambda: SubsetRandomSampler(range(5, 15)),
        lambda: RandomSampler(numbered(20), replacement=True, num_samples=12),
    ],
)
def test_other_samplers_draw_the_same_on_every_rank_and_restore_the_generators(make):
    def sharded(dp_size):
        ranks = []
        for rank in range(dp_size):
            torch.manual_seed(rank)  # ranks rarely share their generators' states
            ranks.append(
                shard_loader(
                    DataLoader(numbered(20), 4, sampler=make()), batch_size=4 // dp_size, dp_rank=rank, dp_size=dp_size
                )
            )
        return ranks

    single, double = sharded(1), sharded(2)
    torch.manual_seed(11)
    first = real_samples(single)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(11)))
    assert real_samples(double) == first
    assert real_samples(single) != first  # another epoch
    assert len(flat(first)) == len(list(make()))


def test_the_generator_of_a_sampler_is_restored():
    generator = torch.Generator().manual_seed(4)
    source = DataLoader(numbered(20), 4, sampler=WeightedRandomSampler(torch.ones(20), 30, generator=generator))
    before = generator.get_state()
    list(shard_loader(source, batch_size=4))
    assert torch.equal(generator.get_state(), before)


def test_batches_of_a_batch_sampler_are_distributed_whole():
    class Buckets:
        def __iter__(self):
            yield from [[0, 1, 2], [3], [4, 5]]

    ranks = loaders(DataLoader(numbered(6), batch_sampler=Buckets()), 2, batch_size=None)
    steps = [
        [(batch[1].tolist(), rank.current.samples) for rank, batch in zip(ranks, batches, strict=True)]
        for batches in zip(*ranks, strict=True)
    ]
    assert steps == [[([0, 1, 2], 3), ([3], 1)], [([4, 5], 2), ([4], 0)]]


def test_a_plain_batch_sampler_given_by_hand_is_read_as_one():
    source = DataLoader(numbered(9), batch_sampler=BatchSampler(SequentialSampler(numbered(9)), 4, drop_last=True))
    assert flat(real_samples(loaders(source, 2, batch_size=2))) == list(range(8))


def test_keys_that_are_not_numbers_reach_the_data_set():
    class Named(Dataset):
        def __getitem__(self, key):
            return key.upper()

        def __len__(self):
            return 3

    source = DataLoader(Named(), batch_size=2, sampler=["a", "b", "c"], collate_fn="".join)
    assert list(shard_loader(source, batch_size=2)) == ["AB", "C"]


@pytest.mark.parametrize(
    "dataset", [numbered(50), Subset(numbered(80), range(79, 9, -1)), Subset(numbered(9), [3, 1, 1, 8])]
)
def test_gathering_gives_bit_identical_batches(dataset):
    indices = np.array([3, 0, 2, 1, 1])[: len(dataset)]
    quick = BatchFetcher(dataset, default_collate, seed=0)
    assert quick._gather is not None
    expected = default_collate([dataset[index] for index in indices.tolist()])
    got = quick[BatchRequest(indices, 0, 0)]
    assert type(got) is type(expected)
    assert all(
        torch.equal(mine, theirs) and mine.dtype == theirs.dtype for mine, theirs in zip(got, expected, strict=True)
    )


def test_gathering_does_not_bypass_user_code():
    class Doubling(TensorDataset):
        def __getitem__(self, index):
            return tuple(2 * field for field in super().__getitem__(index))

    (batch,) = shard_loader(DataLoader(Doubling(torch.ones(3)), batch_size=3), batch_size=3)
    assert batch[0].tolist() == [2, 2, 2]
    (batch,) = shard_loader(DataLoader(numbered(2), 2, collate_fn=len), batch_size=2)
    assert batch == 2


class Reporting(Dataset):
    """Says where it was read, and what its worker_init_fn did."""

    mark = 0

    def __len__(self):
        return 8

    def __getitem__(self, index):
        info = get_worker_info()
        return index, -1 if info is None else info.id, self.mark


def mark_worker(worker_id):
    get_worker_info().dataset.mark = 100 + worker_id


def test_workers_collate_and_init_function_are_kept():
    source = DataLoader(
        Reporting(),
        2,
        num_workers=2,
        worker_init_fn=mark_worker,
        collate_fn=list,
        persistent_workers=True,
        prefetch_factor=3,
    )
    loader = shard_loader(source, batch_size=None)
    for _ in range(2):
        batches = list(loader)
        assert [item for batch in batches for item in batch] == [
            (index, (index // 2) % 2, 100 + (index // 2) % 2) for index in range(8)
        ]
    loader.close()


def test_current_is_set_before_a_micro_batch_is_yielded():
    loader = shard_loader(DataLoader(numbered(5)), batch_size=2, accumulation=2)
    seen = [loader.current for _ in loader]
    assert seen == [
        MicroInfo(2, 4, 0.5, False, 0),
        MicroInfo(2, 4, 0.5, True, 2),
        MicroInfo(1, 1, 1.0, True, 4),
    ]


class TellsEpoch(Dataset):
    """Its samples are the epoch that `set_epoch` was last called with."""

    epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return float(self.epoch)


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_set_epoch_is_called_for_every_epoch_in_every_process(workers):
    loader = shard_loader(DataLoader(TellsEpoch(), batch_size=4, **workers), batch_size=4)
    assert [batch.unique().tolist() for _ in range(3) for batch in loader] == [[0.0], [1.0], [2.0]]
    loader.close()
