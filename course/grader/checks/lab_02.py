"""Lab 02, Horovod: the learner's command starts real ranks, the classifier equals one process, timelines are read."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from grader.catalog import COURSE
from grader.checks.lab_02_wire import grade_benchmark, grade_settings, listed
from grader.exercise import Attempt, Exercise, Mistake
from grader.horovod_ranks import joined, need_horovod, rendezvous

_HOSTS = "host-a:1,host-b:1"
"""Two hosts with one rank each, as Horovod's variables tell the ranks; both are this machine."""
_NAMES = ("localhost", "127.0.0.1")
_RANKS_ERROR = re.compile(r"\[(\d+)\]<std(?:err|out)>:(\w+(?:Error|Exception): .*)")
_RATE, _MOMENTUM, _EPOCHS, _BATCH, _IMAGES = 0.05, 0.9, 3, 4, 35


def words_of(module: ModuleType, hosts: dict[str, int], program: list[str], interface: str) -> list[str]:
    """Return the learner's command line."""
    return listed(module.horovodrun_words(hosts, program, interface), "horovodrun_words", "words")


def say_hello(module: ModuleType, rank: int, world: int, slots: list[dict[str, Any]]) -> Any:
    """Return what the learner's hello returns on a rank that has Horovod's variables and has not joined yet."""
    os.environ.update({name: str(value) for name, value in slots[rank].items()})
    return module.hello()


def grade_hosts(attempt: Attempt) -> None:
    """The words are right for several clusters, four ranks know their places, and the command starts two real ones."""
    need_horovod()
    slots = [attempt.random.randrange(2, 9) for _ in range(3)]
    for hosts in ({"node-a": slots[0], "node-b": slots[1]}, {"gpu1": slots[2], "gpu2": 1, "gpu3": 1}):
        program = ["python", "train.py", "--epochs", str(attempt.seed() % 90 + 1)]
        _check_words(attempt.call(words_of, hosts, program, "eth7"), hosts, program, "eth7")
    # Names that no answer knows before, and two ranks on each host: only there do local and cross numbers differ.
    names = [f"node-{number}" for number in attempt.random.sample(range(100), 2)]
    with rendezvous(",".join(f"{name}:2" for name in names)) as places:
        answers = attempt.run(say_hello, 4, (places,), timeout=30)
    _check_hello([answer.value for answer in answers], names, 2)
    program = [sys.executable, "-P", "-m", "grader.horovod_ranks", str(attempt.answer), str(attempt.folder)]
    words = attempt.call(words_of, dict.fromkeys(_NAMES, 1), program, "lo")
    _start(attempt, words)
    files = [attempt.folder / f"hello-{rank}.json" for rank in range(2)]
    _check_hello([json.loads(file.read_text()) if file.exists() else None for file in files], _NAMES, 1)


def _check_hello(found: list[Any], names: Sequence[str], slots: int) -> None:
    """Raise where a rank did not return the lines of all ranks."""
    hosts = f"{len(names)} hosts with {slots} slot{'s' * (slots > 1)} each"
    wanted = [
        f"rank {host * slots + number} of {len(names) * slots}: number {number} of {slots} on host {host} of"
        f" {len(names)} ({name})"
        for host, name in enumerate(names)
        for number in range(slots)
    ]
    for rank, lines in enumerate(found):
        if lines == wanted[rank : rank + 1]:
            raise Mistake(f"hello returned the own line only on rank {rank}: gather the lines of all ranks")
        if lines != wanted:
            raise Mistake(f"hello returned {lines} on rank {rank} of {hosts}; it should return {wanted}")


def _check_words(words: list[str], hosts: dict[str, int], program: list[str], interface: str) -> None:
    ranks = sum(hosts.values())
    if not words or words[0] != "horovodrun":
        raise Mistake(f"the first word is {words[:1]}; the command is horovodrun")
    if words[-len(program) :] != program:
        raise Mistake(f"the last words are {words[-len(program) :]}; they should be the program: {program}")
    options = words[1 : -len(program)]
    for names, value, what in (
        (("-np", "--num-proc"), str(ranks), f"one rank for each of the {ranks} slots of {len(hosts)} hosts"),
        (("-H", "--hosts"), ",".join(f"{name}:{count}" for name, count in hosts.items()), "host:slots of each host"),
        (("--network-interfaces", "--network-interface"), interface, "the card that was given"),
    ):
        given = [options[place + 1] for place, word in enumerate(options[:-1]) if word in names]
        if given != [value]:
            shown = f"{names[0]} {given[0]}" if given else f"no {names[0]}"
            raise Mistake(f"for hosts {hosts} the words have {shown}; write {names[0]} {value}: {what}")
    for word, why in (
        ("--gloo", "ranks talk by gloo, also where Horovod was built with MPI"),
        ("--disable-cache", "horovodrun keeps the result of its check of the hosts for an hour"),
    ):
        if word not in options:
            raise Mistake(f"the words have no {word}: {why}")


def _start(attempt: Attempt, words: list[str]) -> None:
    """Run the command as the learner would, and raise with its last lines where it fails."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {**os.environ, "PATH": path, "PYTHONPATH": str(COURSE), "OMP_NUM_THREADS": "1"}
    log, left = attempt.folder / "horovodrun.log", attempt.exercise.limit - (time.monotonic() - attempt.began)
    with log.open("w") as output:
        process = subprocess.Popen(
            words, cwd=attempt.folder, env=variables, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(max(1.0, left))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if code != 0:
        how = "did not end" if code is None else f"ended with exit code {code}"
        if any("NotImplementedError: hello" in line for line in said):
            raise Mistake("hello is not written yet")
        errors = [f"rank {found[1]}: {found[2]}" for line in said if (found := _RANKS_ERROR.match(line))]
        raise Mistake(f"horovodrun on localhost and 127.0.0.1 {how}: {[*said[-1:], *errors][-1] if said else ''}")


def make_model(seed: int) -> nn.Module:
    """Return a small convolutional network in float64, in which one process and two agree to the last digits."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 5)).double()


def make_images(seed: int) -> tuple[Tensor, Tensor]:
    """Return images of 6 x 6 points and their labels; the last ones do not fill a step of two ranks."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(_IMAGES, 1, 6, 6, generator=draw).double(), torch.randint(0, 5, (_IMAGES,), generator=draw)


def one_process(seed: int, mistake: str = "", rank: int = 0) -> tuple[list[Tensor], list[float]]:
    """Return weights and losses of the global batches on one process; or those that a mistake would give."""
    model, (images, labels) = make_model(seed), make_images(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE, momentum=_MOMENTUM)
    steps, losses = _IMAGES // (2 * _BATCH), []
    for epoch in range(_EPOCHS):
        draw = torch.Generator().manual_seed(seed + (0 if mistake == "order" else epoch))
        order, total = torch.randperm(_IMAGES, generator=draw), 0.0
        for step in range(steps):
            warm = 1.0 if mistake == "warm-up" else min(1.0, (epoch * steps + step + 1) / steps)
            optimizer.param_groups[0]["lr"] = _RATE if mistake == "rate" else _RATE * (1 + warm)
            rows = order[step * 2 * _BATCH : (step + 1) * 2 * _BATCH]
            rows = {"alone": rows[rank::2], "same": rows[::2], "first": rows[:_BATCH]}.get(mistake, rows)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
            (loss * 2 if mistake == "sum" else loss).backward()
            optimizer.step()
            total += loss.item()
        losses.append(total / steps)
    return [parameter.detach().clone() for parameter in model.parameters()], losses


_MISTAKES = {
    "rate": f"the weights are those of a rate that stays {_RATE}: scale it by the number of ranks",
    "warm-up": f"the weights are those of a rate of {2 * _RATE} from the first step: let it rise over the first epoch",
    "order": "the weights are those of the same order in each epoch: the seed of epoch e is seed + e",
    "sum": "the weights are those of a sum of the ranks' gradients: the update takes their mean",
    "same": "the weights are those of the half of each step that rank 0 has: both ranks took the same images",
    "first": "the weights are those of the first half of each step: both ranks took the same images",
}


def run_train(
    module: ModuleType, rank: int, world: int, slots: list[dict[str, str]], seed: int, folder: str
) -> dict[str, Any]:
    """Train with the learner's function; rank 1 has other weights at first, and each rank has its own folder."""
    joined(slots[rank])
    model, (images, labels) = make_model(seed if rank == 0 else seed + 1), make_images(seed)
    seen = 0

    def count(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        nonlocal seen
        seen += len(inputs[0])

    model.register_forward_pre_hook(count)
    own = Path(folder) / f"rank-{rank}"
    own.mkdir()
    losses = listed(module.train(model, images, labels, _EPOCHS, _BATCH, _RATE, seed, own), "train", "losses")
    file = own / "model.pt"
    saved = torch.load(file) if file.exists() else {}
    if not isinstance(saved, dict):
        raise TypeError(f"model.pt holds a {type(saved).__name__}; save the model's state_dict")
    return {
        "weights": [parameter.detach().clone() for parameter in model.parameters()],
        "losses": [float(loss) for loss in losses],
        "seen": seen,
        "files": sorted(path.name for path in own.iterdir()),
        "saved": list(saved.values()),
    }


def grade_train(attempt: Attempt) -> None:
    """Weights, losses, samples and files of two ranks are those of one process on the global batches."""
    seed = attempt.seed() % 10**6
    with rendezvous(_HOSTS) as slots:
        answers = attempt.run(run_train, 2, (slots, seed, str(attempt.folder)), timeout=40)
    found = [answer.value for answer in answers]
    weights, losses = one_process(seed)
    if any(bool(weight.isnan().any()) for value in found for weight in value["weights"]):
        raise Mistake("some weights are NaN (not a number) at the end: print the rate and the loss of each step")
    apart = gap(found[0]["weights"], found[1]["weights"])
    if apart > 1e-9:
        alone, _ = one_process(seed, "alone")
        if gap(found[0]["weights"], alone) < 1e-9:
            raise Mistake("each rank trains alone: hvd.DistributedOptimizer averages the gradients")
        raise Mistake(f"the ranks end with different weights (by {apart:.1e}): they must begin with those of rank 0")
    if gap(found[0]["weights"], weights) > 1e-9:
        for name, text in _MISTAKES.items():
            if gap(found[0]["weights"], one_process(seed, name)[0]) < 1e-9:
                raise Mistake(text)
        raise Mistake(
            f"both ranks have the same weights, but they differ from one process on the global batches by"
            f" {gap(found[0]['weights'], weights):.1e}: compare the order, the rows and the rate with the docstring"
        )
    share = _EPOCHS * (_IMAGES // (2 * _BATCH)) * _BATCH
    for rank, value in enumerate(found):
        if value["seen"] != share:
            raise Mistake(f"rank {rank} computed {value['seen']} images in {_EPOCHS} epochs; its part is {share}")
        if len(value["losses"]) != _EPOCHS or gap_of_numbers(value["losses"], losses) > 1e-9:
            raise Mistake(
                f"rank {rank} returned the losses {[round(loss, 4) for loss in value['losses']]}; the means over all"
                f" steps and ranks are {[round(loss, 4) for loss in losses]}"
            )
    if found[1]["files"]:
        raise Mistake(f"rank 1 wrote {found[1]['files']}: on a shared disk two ranks would write the same file at once")
    if "model.pt" not in found[0]["files"]:
        raise Mistake(f"rank 0 wrote {found[0]['files'] or 'no file'}; model.pt is asked for")
    if gap(found[0]["saved"], weights) > 1e-9:
        raise Mistake("model.pt does not hold the weights after the last step: save the model's state_dict at the end")


def gap(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Return the largest difference between two lists of tensors."""
    return gap_of_numbers([float((one - other).abs().max()) for one, other in zip(found, wanted, strict=True)])


def gap_of_numbers(found: list[float], wanted: list[float] | None = None) -> float:
    """Return the largest difference between two lists of numbers, or from 0; not a number is as far as can be."""
    gaps = [abs(one - other) for one, other in zip(found, wanted or [0.0] * len(found), strict=True)]
    return max(math.inf if math.isnan(each) else each for each in gaps)


EXERCISES = (
    Exercise(
        name="horovod-hosts",
        title="Start Horovod on two hosts",
        template="module-202/labs/lab-02-horovod/starter/launch.py",
        target="horovodrun_words",
        points=10,
        grade=grade_hosts,
        programs=True,
    ),
    Exercise(
        name="horovod-classifier",
        title="An image classifier on all ranks",
        template="module-202/labs/lab-02-horovod/starter/train.py",
        target="train",
        points=15,
        grade=grade_train,
        programs=True,
        forbidden=("torch.distributed.all_reduce",),
    ),
    Exercise(
        name="horovod-settings",
        title="Communication settings, proved by a timeline",
        template="module-202/labs/lab-02-horovod/starter/settings.py",
        target="settings",
        points=15,
        grade=grade_settings,
        programs=True,
    ),
    Exercise(
        name="horovod-benchmark",
        title="A benchmark that can be trusted",
        template="module-202/labs/lab-02-horovod/starter/benchmark.py",
        target="benchmark",
        points=10,
        grade=grade_benchmark,
        programs=True,
        forbidden=("torch.distributed.all_reduce",),
    ),
)
