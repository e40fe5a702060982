"""The collectives against plain arithmetic: every algorithm, op, dtype and odd shape, at world sizes 1 to 5 and 8."""

from __future__ import annotations

import pytest
import torch

from phalanx.comm.collectives import (
    ALGORITHMS,
    P2PChannel,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    channel,
    chunks,
    gather,
    reduce,
    reduce_scatter,
    ring,
    scatter,
)

SHAPES = [(), (0,), (1,), (3,), (17,), (4, 5), (3, 0), (24, 2)]
DTYPES = ["float32", "float64", "float16", "bfloat16", "int64", "uint8", "bool", "complex64"]
OPS = {
    "sum": lambda stack: stack.any(0) if stack.dtype == torch.bool else stack.sum(0, dtype=stack.dtype),
    "mean": lambda stack: stack.mean(0),
    "min": lambda stack: stack.amin(0),
    "max": lambda stack: stack.amax(0),
    "prod": lambda stack: stack.all(0) if stack.dtype == torch.bool else stack.prod(0, dtype=stack.dtype),
}


def values(rank: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """What one rank holds; every rank can say what every other one holds."""
    generator = torch.Generator().manual_seed(100 * rank + len(shape))
    drawn = torch.randint(0, 4, shape, generator=generator).to(getattr(torch, dtype))
    return drawn + 1j if drawn.is_complex() else drawn


def stacked(size: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    return torch.stack([values(rank, shape, dtype) for rank in range(size)])


def allowed(op: str, dtype: str) -> bool:
    kind = getattr(torch, dtype)
    is_number = kind.is_floating_point or kind.is_complex
    return not (op == "mean" and not is_number) and not (op in ("min", "max") and kind.is_complex)


def check_all_reduces(line: P2PChannel) -> int:
    """All algorithms on all of it; small integers, so that every order of additions gives the same."""
    checked = 0
    is_power = line.size & (line.size - 1) == 0
    for name, function in ALGORITHMS["all_reduce"].items():
        if name == "fixed-order" and not is_power:
            continue
        for dtype in DTYPES if line.size < 5 else DTYPES[:1]:
            for op in filter(lambda op: allowed(op, dtype), OPS):
                shape = SHAPES[checked % len(SHAPES)]
                tensor = values(line.rank, shape, dtype)
                function(tensor, line, op)
                torch.testing.assert_close(
                    tensor, OPS[op](stacked(line.size, shape, dtype)), msg=f"{name} {dtype} {op}"
                )
                checked += 1
    return checked


def check_the_others(line: P2PChannel) -> None:
    size, rank = line.size, line.rank
    for shape in SHAPES:
        own, every = values(rank, shape, "float32"), stacked(size, shape, "float32")
        root = size - 1
        assert torch.equal(all_gather(own, line), every)
        given = own.clone()
        rows = torch.tensor_split(every.sum(0).reshape(shape or (1,)), size)[rank]
        assert torch.equal(reduce_scatter(given, line), rows)
        assert torch.equal(given, own)
        broadcast(given, line, root)
        assert torch.equal(given, every[root])
        given = own.clone()
        reduce(given, line, "max", root)
        assert torch.equal(given, every.amax(0) if rank == root else own)
        found = gather(own, line, root)
        assert torch.equal(found, every) if rank == root else found is None
        given = torch.empty_like(own)
        scatter(given, line, every + 1 if rank == root else None, root)
        assert torch.equal(given, every[rank] + 1)
        mine = every + 10 * rank
        assert torch.equal(all_to_all(mine, line), torch.stack([every[rank] + 10 * other for other in range(size)]))
        barrier(line)


def check_layouts(line: P2PChannel) -> None:
    """Non-contiguous tensors, conjugated views, parameters: written in place where they are."""
    every = stacked(line.size, (6, 5), "float32")
    for function in (ring.all_reduce, ALGORITHMS["all_reduce"]["tree"], ALGORITHMS["all_reduce"]["hierarchical"]):
        holder = torch.zeros(5, 6, 2)
        view = holder[..., 0].t()
        view.copy_(every[line.rank])
        function(view, line)
        assert torch.equal(view, every.sum(0))
        assert not holder[..., 1].any()
    assert torch.equal(all_gather(every[line.rank].t(), line), every.transpose(1, 2))
    parameter = torch.nn.Parameter(every[line.rank].clone())
    all_reduce(parameter, line, algorithm="halving-doubling")
    assert torch.equal(parameter.detach(), every.sum(0))
    conjugated = values(line.rank, (3,), "complex64").conj()
    all_reduce(conjugated, line)
    assert torch.equal(conjugated, stacked(line.size, (3,), "complex64").conj().sum(0))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_every_collective_gives_the_expected_values(ranks, size):
    def run():
        line = P2PChannel()
        checked = check_all_reduces(line)
        check_the_others(line)
        check_layouts(line)
        return checked

    assert all(checked >= (120 if size < 5 else 20) for checked in ranks(run, world_size=size))


@pytest.mark.parametrize("size", [2, 3])
def test_chunks_that_follow_each_other(ranks, size):
    """More chunks than receives are posted ahead, so that every slot is used again; the last chunk is shorter."""

    def run():
        channel.CHUNK_BYTES = chunks.CHUNK_BYTES = 64
        channel.DEPTH = 2
        line = P2PChannel()
        every = stacked(size, (1001,), "float32")
        for function in ALGORITHMS["all_reduce"].values():
            if size == 3 and function.__module__.endswith("fixed_order"):
                continue
            tensor = every[line.rank].clone()
            function(tensor, line, "mean")
            torch.testing.assert_close(tensor, every.mean(0))
        assert torch.equal(all_gather(every[line.rank], line), every)
        assert torch.equal(reduce_scatter(every[line.rank], line), torch.tensor_split(every.sum(0), size)[line.rank])

    ranks(run, world_size=size)


def test_hierarchical_over_hosts(ranks):
    """Two ranks per host that are not neighbours; between hosts only leaders send."""

    def run():
        line = P2PChannel()
        every = stacked(4, (12,), "float32")
        tensor = every[line.rank].clone()
        ALGORITHMS["all_reduce"]["hierarchical"](tensor, line, "mean", groups=[[0, 2], [3, 1]])
        torch.testing.assert_close(tensor, every.mean(0))
        return line.sent_bytes

    whole = 12 * 4
    # Leaders (0 and 3): a ring of two sends the data once, and each hands it down once. Others send it up once.
    assert ranks(run, world_size=4) == [2 * whole, whole, whole, 2 * whole]
