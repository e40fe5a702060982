"""Shards in the memory of other ranks: what is left after a loss, and that it is the state that was kept."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from phalanx.checkpoint import Snapshot
from phalanx.recovery.ranks.neighbour_memory import NeighbourMemory, _shift


def test_the_neighbour_is_on_another_host():
    assert _shift(["a", "a", "b", "b"]) == 2
    assert _shift(["a", "b", "a", "b"]) == 1
    assert _shift(["a", "a", "a"]) == 1


def sharded() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 33), nn.Linear(33, 7))
    fully_shard(model)
    return model


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.to_local().fill_(value + number)


def snapshot(model: nn.Module, step: int) -> Snapshot:
    state = {"rank": dist.get_rank(), "noise": torch.full((3,), float(step))}
    return Snapshot(step, 1, {"model": model.state_dict(), "lr": step / 10}, state, {"seen": step * 8})


def lose(memory: NeighbourMemory, *ranks: int) -> None:
    """Forget everything, as a process that replaces a lost rank starts."""
    if dist.get_rank() in ranks:
        memory._shards.clear()
        memory._used.clear()


def recover(lost: tuple[int, ...], background: bool) -> tuple[int | None, list[float], float, object]:
    model = sharded()
    memory = NeighbourMemory(dist.new_group(backend="gloo"))
    for step in (1, 2, 3):
        fill(model, step * 10)
        memory.keep(snapshot(model, step), wait=not background)
        fill(model, -1)
        memory.finish()
    lose(memory, *lost)
    memory.rejoin(dist.new_group(backend="gloo"))
    template = {"model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}, "lr": 0.0}
    newest = memory.newest()
    loaded = memory.load(template)
    if loaded is None:
        return newest, [], 0.0, None
    assert loaded.shared == {"seen": loaded.step * 8}
    assert loaded.rank_state["rank"] == dist.get_rank()
    assert loaded.rank_state["noise"].eq(loaded.step).all()
    values = [float(value.full_tensor().unique().item()) for value in template["model"].values()]
    # It goes on: the next step is kept with the memory that is left.
    fill(model, 70)
    memory.keep(snapshot(model, 4))
    assert memory.newest() == 4
    assert len(memory._shards) <= 2
    return newest, values, template["lr"], loaded.notes


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("lost", [(), (0,), (2,)])
def test_the_state_comes_back_after_the_loss_of_any_rank(ranks, lost, background):
    for newest, values, rate, notes in ranks(recover, lost, background, world_size=3):
        assert (newest, rate, notes) == (3, 0.3, [])
        assert values == [30.0, 31.0, 32.0, 33.0]


def test_without_two_neighbours_nothing_is_left(ranks):
    assert ranks(recover, (0, 1), False, world_size=3) == [(None, [], 0.0, None)] * 3


def recover_in_a_smaller_group(step_lost: int) -> tuple[int, list[float]] | None:
    model = sharded()
    memory = NeighbourMemory(dist.new_group(backend="gloo"))
    whole = {}
    for step in (1, 2):
        fill(model, step * 10)
        whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
        memory.keep(snapshot(model, step))
    if step_lost and dist.get_rank() == 1:  # its exchange of the last step broke off
        del memory._shards[next(reversed(memory._shards))]
    group = dist.new_group([0, 1], backend="gloo")
    if dist.get_rank() == 2:
        return None
    memory.rejoin(group)
    template = {"model": {name: torch.zeros_like(value) for name, value in whole.items()}, "lr": 0.0}
    loaded = memory.load(template)
    assert loaded.rank_state is None
    assert "kept by 3 ranks and loaded by 2" in loaded.notes[0]
    return loaded.step, [float(value.unique().item()) for value in template["model"].values()]


@pytest.mark.parametrize(("step_lost", "step"), [(0, 2), (2, 1)])
def test_fewer_ranks_load_the_newest_complete_step(ranks, step_lost, step):
    first, second, _ = ranks(recover_in_a_smaller_group, step_lost, world_size=3)
    values = [step * 10.0 + number for number in range(4)]
    assert first == second == (step, values)


def traffic(layers: int) -> tuple[list[int], int, int]:
    """Return the bytes of what a rank sends for a step, the size of its shard, and the collectives of objects."""
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers)])
    fully_shard(model)
    memory = NeighbourMemory(dist.new_group(backend="gloo"))
    for step in (1, 2):
        memory.keep(snapshot(model, step))
    sent: list[int] = []
    objects: list[str] = []
    isend = dist.isend
    dist.isend = lambda tensor, **to: (sent.append(tensor.nbytes), isend(tensor, **to))[1]
    for name in ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"):
        setattr(dist, name, lambda *_, name=name, **__: objects.append(name))
    memory.keep(snapshot(model, 3))
    return sent, memory._used[next(reversed(memory._shards))].view().nbytes, len(objects)


def test_a_step_is_sent_to_one_rank_and_without_the_names_of_all_tensors(ranks):
    described = []
    for layers in (2, 40):
        for sent, shard, objects in ranks(traffic, layers, world_size=3):
            assert objects == 0
            sizes, description, data = sent
            assert (sizes, data) == (16, shard)
            described.append(description)
    assert max(described) < 2000
