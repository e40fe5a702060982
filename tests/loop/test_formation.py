"""`Formation` in a user's loop: equal to plain PyTorch for any split, and resumable to the bit."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Formation
from phalanx.checkpoint import verify
from phalanx.errors import UsageError

EPOCHS = 2


def make_model() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def make_data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(samples, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x[:, :3].argmax(1))


def make_formation(**settings) -> Formation:
    return Formation(**{"device": "cpu", **settings})


def plain_loop(samples: int, global_batch: int, clip: float | None = None) -> dict:
    """What a tutorial would write for one process."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(EPOCHS):
        for x, y in DataLoader(make_data(samples), batch_size=global_batch):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return model.state_dict()


def own_loop(
    samples: int, batch_size: int, accumulation: int, *, clip: float | None = None, zero_first: bool = False
) -> dict:
    """The same loop in formation, with zero_grad at either end of it."""
    with make_formation(batch_size=batch_size, gradient_accumulation_steps=accumulation) as formation:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        wrapped, optimizer, loader = formation.prepare(model, optimizer, DataLoader(make_data(samples)))
        for _ in range(EPOCHS):
            for x, y in loader:
                if zero_first:
                    optimizer.zero_grad()
                formation.backward(F.cross_entropy(wrapped(x), y))
                if clip:
                    formation.clip_grad_norm(clip)
                optimizer.step()
                if not zero_first:
                    optimizer.zero_grad()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        del wrapped
    return state


@pytest.mark.parametrize("zero_first", [True, False])
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize(("batch_size", "accumulation"), [(8, 1), (2, 4)])
def test_a_users_loop_equals_one_process(ranks, batch_size, accumulation, clip, zero_first):
    """37 samples in global batches of 16 leave five for two ranks: some get one more than others, some none."""
    expected = plain_loop(37, 16, clip)
    for state in ranks(lambda: own_loop(37, batch_size, accumulation, clip=clip, zero_first=zero_first), world_size=2):
        torch.testing.assert_close(state, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("zero_first", [True, False])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_loader_that_was_not_prepared_works_too(ranks, accumulation, zero_first):
    """The user deals out the samples; a step comes every `accumulation` calls of backward."""
    micro = 16 // 2 // accumulation

    def train() -> dict:
        with make_formation(gradient_accumulation_steps=accumulation) as formation:
            model = make_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            wrapped, optimizer = formation.prepare(model, optimizer)
            data = make_data(48)
            for _ in range(EPOCHS):
                for start in range(0, 48, 16):
                    mine = range(start + formation.rank * 8, start + formation.rank * 8 + 8, micro)
                    for first in mine:
                        x, y = data[first : first + micro]
                        if zero_first:
                            optimizer.zero_grad()
                        formation.backward(F.cross_entropy(wrapped(x), y))
                        optimizer.step()
                        if not zero_first:
                            optimizer.zero_grad()
            state = {name: value.clone() for name, value in model.state_dict().items()}
            del wrapped
        return state

    expected = plain_loop(48, 16)
    for state in ranks(train, world_size=2):
        torch.testing.assert_close(state, expected, rtol=0, atol=1e-12)


def test_gradients_are_sent_only_on_the_last_micro_batch(ranks):
    def count() -> list[int]:
        reduced = []

        def counting(state, bucket):
            reduced.append(1)
            return dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future().then(lambda f: f.value()[0])

        with make_formation(batch_size=2, gradient_accumulation_steps=4, strategy="ddp") as formation:
            wrapped, optimizer, loader = _prepared(formation, 32)
            wrapped.register_comm_hook(None, counting)
            counts = []
            for x, y in loader:
                before = len(reduced)
                formation.backward(F.cross_entropy(wrapped(x), y))
                counts.append(len(reduced) - before)
                optimizer.step()
                optimizer.zero_grad()
            del wrapped
        return counts

    for counts in ranks(count, world_size=2):
        assert counts == [0, 0, 0, 1] * 2


def read_two_loaders(samples: tuple[int, int], *, refused: bool) -> None:
    with make_formation(batch_size=4) as formation:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        loaders = [DataLoader(make_data(each)) for each in samples]
        wrapped, optimizer, *loaders = formation.prepare(model, optimizer, *loaders)
        with pytest.raises(UsageError, match="read together") if refused else contextlib.nullcontext():
            for (x, y), _ in zip(*loaders, strict=False):
                formation.backward(F.cross_entropy(wrapped(x), y))
                optimizer.step()
        assert formation.step == (0 if refused else min(-(-each // 8) for each in samples))
        for batches in map(iter, loaders):
            x, y = next(batches)
            formation.backward(F.cross_entropy(wrapped(x), y))
        del wrapped


def test_two_loaders_read_together_have_equal_shares_or_are_refused(ranks):
    """At the first batch, before any step; one after the other, each with its backward call, they need not be equal."""

    def run() -> None:
        for samples, refused in (((16, 9), True), ((16, 8), False), ((9, 8), False), ((9, 12), True), ((9, 9), False)):
            read_two_loaders(samples, refused=refused)

    ranks(run, world_size=2)


def _prepared(formation: Formation, samples: int) -> tuple:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return formation.prepare(model, optimizer, DataLoader(make_data(samples), shuffle=True))


def test_reduce_print_and_ranks(ranks):
    def look() -> tuple:
        with make_formation() as formation:
            me = formation.rank
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                formation.print("only once", me)
            values = [formation.reduce(float(me + 1), op).item() for op in ("mean", "sum", "min", "max")]
            whole = formation.reduce(me, "mean").item()
            with pytest.raises(UsageError, match="unknown op 'median'"):
                formation.reduce(1.0, "median")
            return values, whole, said.getvalue(), formation.world_size, formation.is_main

    first, second = ranks(look, world_size=2)
    assert first == ([1.5, 3.0, 1.0, 2.0], 0.5, "only once 0\n", 2, True)
    assert second == ([1.5, 3.0, 1.0, 2.0], 0.5, "", 2, False)


@pytest.mark.parametrize("value", ["0.5", ["a", "b"], None])
def test_what_is_not_a_number_cannot_be_reduced(value):
    with Formation(device="cpu") as formation, pytest.raises(UsageError, match=r"reduce\(\) got a"):
        formation.reduce(value)


def test_clipping_returns_one_norm_and_only_at_a_boundary(ranks):
    def clip() -> list[float | None]:
        with make_formation(batch_size=4, gradient_accumulation_steps=2) as formation:
            wrapped, _, loader = _prepared(formation, 16)
            norms = []
            for x, y in loader:
                formation.backward(F.cross_entropy(wrapped(x), y))
                norm = formation.clip_grad_norm(1e-3)
                norms.append(None if norm is None else norm.item())
            after = formation.grad_norm().item()
            del wrapped
        return [*norms, after]

    first, second = ranks(clip, world_size=2)
    assert first == second
    assert first[0] is None
    assert first[1] > 1e-3
    assert first[2] == pytest.approx(1e-3, rel=1e-3)


def resumable_loop(folder: str, stop_after: int | None, *, resume: bool) -> dict:
    """Train with dropout, a scheduler and shuffling; stop after some steps, or resume from there."""
    with make_formation(batch_size=3, seed=4) as formation:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 9), nn.Dropout(0.4), nn.Linear(9, 3)).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5, 8], gamma=0.7)
        wrapped, optimizer, scheduler, loader = formation.prepare(
            model, optimizer, scheduler, DataLoader(make_data(20), shuffle=True)
        )
        torch.manual_seed(100 + formation.rank)
        note = formation.load(folder) if resume else None
        while loader.epoch < 3 and (stop_after is None or formation.step < stop_after):
            for x, y in loader:
                formation.backward(F.cross_entropy(wrapped(x), y))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                if formation.step == stop_after:
                    formation.save(folder, note="mine")
                    break
        state = {name: value.clone() for name, value in model.state_dict().items()}
        del wrapped
    return {"state": state, "rate": scheduler.get_last_lr(), "step": formation.step, "note": note}


def test_saved_and_loaded_mid_epoch_it_continues_to_the_bit(ranks, tmp_path):
    folder = str(tmp_path / "ckpt")
    whole = ranks(lambda: resumable_loop(folder + "-unused", None, resume=False), world_size=2)
    ranks(lambda: resumable_loop(folder, 6, resume=False), world_size=2)
    resumed = ranks(lambda: resumable_loop(folder, None, resume=True), world_size=2)
    for before, after in zip(whole, resumed, strict=True):
        torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)
        assert after["rate"] == before["rate"]
        assert after["note"]["note"] == "mine"


def test_a_scheduler_steps_only_with_its_optimizer(ranks):
    def rates() -> list[float]:
        with make_formation(batch_size=2, gradient_accumulation_steps=2) as formation:
            model = make_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            wrapped, optimizer, scheduler, loader = formation.prepare(
                model, optimizer, scheduler, DataLoader(make_data(16))
            )
            seen = []
            for x, y in loader:
                formation.backward(F.cross_entropy(wrapped(x), y))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                seen.append(scheduler.get_last_lr()[0])
            del wrapped
        return seen

    assert ranks(rates, world_size=2)[0] == [1.0, 0.5, 0.5, 0.25]


def adversaries(folder: str, *, resume: bool) -> list[torch.Tensor]:
    """Two models, two optimizers, each with its own loss; saved and loaded together."""
    with make_formation(batch_size=4) as formation:
        first, second = make_model(), make_model()
        one = torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.5)
        two = torch.optim.AdamW(second.parameters(), lr=0.01)
        left, right, one, two, loader = formation.prepare(first, second, one, two, DataLoader(make_data(16)))
        if resume:
            formation.load(folder)
        for x, y in loader:
            formation.backward(F.cross_entropy(left(x), y))
            one.step()
            one.zero_grad()
            formation.backward(F.mse_loss(right(x), left(x).detach()))
            two.step()
            two.zero_grad()
        if not resume:
            formation.save(folder)
        step = formation.step
        del left, right
    return [*first.parameters(), *second.parameters(), torch.tensor(step)]


def test_two_models_with_two_optimizers_train_and_resume(ranks, tmp_path):
    """What two passes give, one pass, saved and loaded, and another pass must give too."""

    def plain() -> list[torch.Tensor]:
        first, second = make_model(), make_model()
        one = torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.5)
        two = torch.optim.AdamW(second.parameters(), lr=0.01)
        for _ in range(2):
            for x, y in DataLoader(make_data(16), batch_size=8):
                one.zero_grad()
                F.cross_entropy(first(x), y).backward()
                one.step()
                two.zero_grad()
                F.mse_loss(second(x), first(x).detach()).backward()
                two.step()
        return [*first.parameters(), *second.parameters(), torch.tensor(4)]

    folder = str(tmp_path / "ckpt")
    ranks(lambda: adversaries(folder, resume=False), world_size=2)
    for result in ranks(lambda: adversaries(folder, resume=True), world_size=2):
        torch.testing.assert_close(result, plain(), rtol=0, atol=1e-12)


def left_with_a_live_model() -> bool:
    """Whether DDP's module still lives when the process group is destroyed: freeing the group after it may deadlock."""
    from phalanx.loop import formation as module

    formation = make_formation(strategy="ddp", communication_backend="gloo")
    wrapped = weakref.ref(formation.prepare(make_model()))
    seen = []
    module.leave_world = lambda world: seen.append(gc.collect() >= 0 and wrapped() is not None)
    formation.close()
    return seen[0]


def test_ddp_is_gone_before_the_group_is_destroyed(ranks):
    assert ranks(left_with_a_live_model, world_size=2) == [False, False]


def waited_for_rank_1() -> float:
    with make_formation(strategy="ddp", communication_backend="gloo") as formation:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = formation.prepare(model, optimizer)
        assert formation.strategy.comm_stats() is None
        for _ in range(3):
            output = model(torch.ones(2, 5, dtype=torch.float64)).sum()
            time.sleep(0.2 * formation.rank)
            output.backward()
            optimizer.step()
        return formation.strategy.comm_stats().waited_s


def test_ddp_knows_how_long_it_waited_for_gradients(ranks):
    first, second = ranks(waited_for_rank_1, world_size=2)
    assert first > 0.4 > second


def test_leaving_restores_what_was_prepared():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with make_formation(gradient_accumulation_steps=4) as formation:
        formation.prepare(model, optimizer)
        assert "step" in optimizer.__dict__
    assert "step" not in optimizer.__dict__
    with contextlib.suppress(KeyError), make_formation() as formation:
        formation.prepare(model, optimizer)
        raise KeyError
    assert "step" not in optimizer.__dict__


def test_what_cannot_be_prepared_is_named():
    with make_formation() as formation, pytest.raises(UsageError, match=r"prepare\(\) got 3, an int"):
        formation.prepare(3)


def incremental_checkpoint(folder: str) -> list[str]:
    """Save what all ranks write in one folder of chunks, as ranks that mpirun or srun started."""
    for name in ("PHALANX_RUN_ID", "TORCHELASTIC_RUN_ID"):
        os.environ.pop(name, None)
    with make_formation(strategy="fsdp", checkpoint_kind="incremental") as formation:
        model = formation.prepare(make_model())
        formation.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        saved = formation.save(folder)
        assert verify(saved.path) == []
        return [formation.run_id, *sorted(path.name for path in Path(folder).glob(".chunks-*"))]


def test_a_run_has_one_name_on_all_ranks_also_without_our_launcher(ranks, tmp_path):
    found = ranks(incremental_checkpoint, str(tmp_path / "kept"), world_size=2)
    assert found[0] == found[1]
    assert found[0] == [found[0][0], f".chunks-{found[0][0]}"]
