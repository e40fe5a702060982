"""Messages between two ranks: send and receive, at once or later, in circles, in batches, and down a pipeline.

    phalanx train --script point_to_point.py --num-workers 2
    torchrun --standalone --nproc-per-node 4 point_to_point.py                      # gloo, or nccl with a GPU a rank
    phalanx train --script point_to_point.py --num-workers 2 -- --show-deadlock     # gloo: what the mistake looks like

A blocking send returns when the other side takes the message. If all ranks send first, no rank receives, and all
wait forever. Small messages may slip through on some backends, so that the mistake shows only when the model grows.

nccl differs from gloo in two ways. It has no tags: messages between two ranks match in the order of the calls. And its
calls only queue work on the GPU, where a send and a receive between the same two ranks run one after the other: two
ranks that both queue the send first are stuck even with isend. `batch_isend_irecv` is right on both.
"""

from __future__ import annotations

import argparse
from datetime import timedelta

import torch
import torch.distributed as dist

import phalanx


def relay(formation: phalanx.Formation) -> None:
    """Blocking send and receive: a token goes from rank to rank, and each adds its number."""
    rank, last = formation.rank, formation.world_size - 1
    token = torch.zeros(1, device=formation.device)
    if rank > 0:
        dist.recv(token, src=rank - 1)
    token += rank
    if rank < last:
        dist.send(token, dst=rank + 1)
    expect(token.item() == rank * (rank + 1) / 2, f"the token is {token.item()} on rank {rank}")
    show(formation, "send, recv: the token as it leaves each rank", f"{token.item():g}")


def work_meanwhile(formation: phalanx.Formation) -> None:
    """isend and irecv return at once: compute, then wait. Until then the tensor belongs to the message."""
    rank = formation.rank
    message = torch.full((4,), rank + 1.0, device=formation.device)
    is_sender = rank % 2 == 0
    request = None
    if not is_sender:
        request = dist.irecv(message, src=rank - 1)
    elif rank + 1 < formation.world_size:
        request = dist.isend(message, dst=rank + 1)
    computed = torch.ones(64, 64, device=formation.device).sum().item()  # not of the message: it may not be here yet
    if request is None:
        own = "has no partner"
    else:
        request.wait()
        own = f"{'sent' if is_sender else 'got'} {row(message)}, computed {computed:g} meanwhile"
    expect(message.eq(rank + 1 if is_sender else rank).all().item(), f"rank {rank} {own}")
    show(formation, "isend, irecv: even ranks send to the next", own)


def ring(formation: phalanx.Formation) -> None:
    """All ranks send to the right at once, in three ways that cannot deadlock."""
    ways = {"by turns": ring_by_turns, "batched": ring_batched}
    if dist.get_backend() != "nccl":
        ways["isend first"] = ring_isend_first
    for name, way in ways.items():
        own = torch.full((2,), float(formation.rank), device=formation.device)
        received = way(own, formation.rank, formation.world_size)
        left = (formation.rank - 1) % formation.world_size
        expect(received.eq(left).all().item(), f"rank {formation.rank} got {received.tolist()} from rank {left}")
        show(formation, f"ring, {name}: from the left neighbour", row(received))
    if dist.get_backend() == "nccl":
        formation.print("\nring, isend first: left out on nccl, where two ranks would wait for each other")


def ring_by_turns(own: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Blocking calls, but the odd ranks take before they give."""
    received = torch.empty_like(own)
    right, left = (rank + 1) % size, (rank - 1) % size
    if rank % 2 == 0:
        dist.send(own, dst=right)
        dist.recv(received, src=left)
    else:
        dist.recv(received, src=left)
        dist.send(own, dst=right)
    return received


def ring_isend_first(own: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """The send is under way while this rank receives; gloo only."""
    received = torch.empty_like(own)
    sending = dist.isend(own, dst=(rank + 1) % size)
    dist.recv(received, src=(rank - 1) % size)
    sending.wait()
    return received


def ring_batched(own: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Both directions in one batch: the backend starts them together."""
    received = torch.empty_like(own)
    operations = [
        dist.P2POp(dist.isend, own, (rank + 1) % size),
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
    ]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    return received


def show_deadlock(formation: phalanx.Formation) -> None:
    """All ranks send first, in a separate group with a short timeout: otherwise it would wait forever."""
    if dist.get_backend() == "nccl":
        formation.print("\ndeadlock: not shown on nccl, whose watchdog ends the process; see nccl_debugging.md")
        return
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    own = torch.zeros(1 << 20)
    try:
        dist.send(own, dst=(formation.rank + 1) % formation.world_size, group=group)
        said = "slipped through"
    except RuntimeError as error:
        said = "stuck: " + str(error).strip().splitlines()[0].split("] ")[-1]
    show(formation, "ring, all ranks send first", said)


def swap_edges(formation: phalanx.Formation, length: int = 4) -> None:
    """A batch with both neighbours: smooth a line that is cut into one piece a rank, as simulations do."""
    rank, last = formation.rank, formation.world_size - 1
    line = torch.arange(length * formation.world_size, dtype=torch.float32, device=formation.device).square()
    padded = torch.zeros(length + 2, device=formation.device)  # beyond the ends of the line is zero
    padded[1:-1] = line.split(length)[rank]
    operations = []
    for neighbour, edge, beyond in ((rank - 1, 1, 0), (rank + 1, length, length + 1)):
        if 0 <= neighbour <= last:
            operations.append(dist.P2POp(dist.isend, padded[edge : edge + 1], neighbour))
            operations.append(dist.P2POp(dist.irecv, padded[beyond : beyond + 1], neighbour))
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    smoothed = (padded[:-2] + padded[1:-1] + padded[2:]) / 3
    whole = torch.nn.functional.pad(line, (1, 1))
    alone = ((whole[:-2] + whole[1:-1] + whole[2:]) / 3).split(length)[rank]
    expect(torch.allclose(smoothed, alone), f"rank {rank} has {row(smoothed)}, one process {row(alone)}")
    show(formation, "batch_isend_irecv: edges swapped, then smoothed as one process would", row(smoothed))


def pipeline(formation: phalanx.Formation, microbatches: int, width: int = 8) -> None:
    """Each rank is a stage: it takes a micro-batch, computes, and sends it on while it takes the next.

    A message carries a clock beside the activations: a stage works one tick after it has the input and is free. So the
    picture is drawn by the messages themselves.
    """
    rank, last = formation.rank, formation.world_size - 1
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(width, width, generator=generator) / width**0.5 for _ in range(last + 1)]
    inputs = torch.randn(microbatches, width, generator=generator)
    ticks, outputs, departures = [], [], []
    tick = -1
    for number in range(microbatches):
        message = torch.empty(width + 1, device=formation.device)
        if rank > 0:
            dist.recv(message, src=rank - 1)
        else:
            message[0], message[1:] = -1, inputs[number]
        tick = max(tick, int(message[0])) + 1
        ticks.append(tick)
        result = torch.tanh(weights[rank].to(formation.device) @ message[1:])
        outputs.append(result)
        if rank < last:
            # Its own tensor for each: it must stay as it is until its message has left.
            leaving = torch.cat([torch.tensor([float(tick)], device=formation.device), result])
            departures.append((dist.isend(leaving, dst=rank + 1), leaving))
    for request, _ in departures:
        request.wait()
    if rank == last:
        alone = inputs
        for weight in weights:
            alone = torch.tanh(alone @ weight.T)
        expect(torch.allclose(torch.stack(outputs).cpu(), alone, atol=1e-5), "the pipeline is not one process's model")
    cells = {tick: str(number) for number, tick in enumerate(ticks)}
    picture = " ".join(cells.get(tick, ".") for tick in range(microbatches + last))
    show(formation, f"pipeline of {microbatches} micro-batches: who works on which, tick by tick", picture)


def expect(is_true: bool, otherwise: str) -> None:
    if not is_true:
        raise AssertionError(otherwise)


def show(formation: phalanx.Formation, title: str, own: str) -> None:
    """Print a line of each rank, on rank 0."""
    every: list[str] = [""] * formation.world_size
    dist.all_gather_object(every, own)
    formation.print("\n".join([f"\n{title}", *(f"  rank {rank}  {text}" for rank, text in enumerate(every))]))


def row(tensor: torch.Tensor) -> str:
    return " ".join(f"{value:g}" for value in tensor.tolist())


def main() -> None:
    args = parse_args()
    if args.microbatches < 1:
        raise SystemExit(f"--microbatches is {args.microbatches}: it must be 1 or more")
    with phalanx.Formation(strategy="ddp") as formation:  # torch's own backend: nccl on GPUs, gloo on CPUs
        if formation.world_size == 1:
            raise SystemExit("one rank has no peer: start two, as the first lines of this file say")
        formation.print(f"{formation.world_size} ranks on {dist.get_backend()}, tensors on {formation.device.type}")
        relay(formation)
        work_meanwhile(formation)
        ring(formation)
        swap_edges(formation)
        pipeline(formation, args.microbatches)
        if args.show_deadlock:
            show_deadlock(formation)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Messages between two ranks.")
    parser.add_argument("--microbatches", type=int, default=4, help="that go through the pipeline")
    parser.add_argument("--show-deadlock", action="store_true", help="let all ranks send first, with a timeout")
    parser.add_argument("--local-rank", "--local_rank", type=int, help="from a launcher; the environment says the same")
    return parser.parse_args()


if __name__ == "__main__":
    main()
