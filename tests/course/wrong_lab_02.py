"""Answers to lab 02: wrong ones with the message that each must get, and other right ones."""

from __future__ import annotations

from wrong import COURSE, Right, Wrong

GATHER = "lines: list[str] = hvd.allgather_object(own)\n    return lines"
HOSTS = (
    Wrong(
        "horovod-hosts",
        "one rank per host",
        (("str(sum(hosts.values()))", "str(len(hosts))"),),
        says="one rank for each of the",
        fast=True,
    ),
    Wrong(
        "horovod-hosts",
        "hosts without slots",
        ((' = ",".join(f"{name}:{count}" for name, count in hosts.items())', ' = ",".join(hosts)'),),
        says="host:slots of each host",
        fast=True,
    ),
    Wrong(
        "horovod-hosts",
        "the program before the options",
        (
            (
                '["horovodrun", *options, "--network-interfaces", interface, *program]',
                '["horovodrun", *program, *options]',
            ),
        ),
        says="they should be the program",
        fast=True,
    ),
    Wrong(
        "horovod-hosts", "another card", (("interface, *program", '"lo", *program'),), says="the card that was given"
    ),
    Wrong("horovod-hosts", "as the build likes", (('"--gloo", "--dis', '"--dis'),), says="the words have no --gloo"),
    Wrong("horovod-hosts", "own line only", ((GATHER, "return [own]"),), says="returned the own line only"),
    Wrong("horovod-hosts", "not initialised", (("    hvd.init()\n    own", "    own"),), says="not been initialized"),
    Wrong(
        "horovod-hosts",
        "number in the world",
        (("number {hvd.local_rank()} of", "number {hvd.rank()} of"),),
        says="rank 2 of 4: number 2 of 2",
    ),
    Wrong(
        "horovod-hosts",
        "the rank as the host",
        (("host {hvd.cross_rank()} of", "host {hvd.rank()} of"),),
        says="on rank 0 of 2 hosts with 2 slots each",
    ),
    Wrong(
        "horovod-hosts",
        "lines of the README",
        (
            (
                GATHER,
                'return [f"rank {one} of 2: number 0 of 1 on host {one} of 2 ({name})"'
                ' for one, name in enumerate(("localhost", "127.0.0.1"))]',
            ),
        ),
        says="on rank 0 of 2 hosts with 2 slots each",
        fast=True,
    ),
    Wrong(
        "horovod-hosts",
        "reads the solution",
        (
            (
                GATHER,
                f"return open({str(COURSE / 'module-202/labs/lab-02-horovod/solution/launch.py')!r}).readlines()",
            ),
        ),
        says="is not for answers",
    ),
)
BROADCAST = "    hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n"
DISTRIBUTED = "optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())"
ROWS = "[rank::size]"
CLASSIFIER = (
    Wrong(
        "horovod-classifier",
        "weights that are not numbers",
        ((BROADCAST, BROADCAST + "    rate = float('nan')\n"),),
        says="some weights are NaN",
    ),
    Wrong("horovod-classifier", "no broadcast", ((BROADCAST, ""),), says="must begin with those of rank 0", fast=True),
    Wrong(
        "horovod-classifier", "a plain optimizer", ((DISTRIBUTED, "optimizer = plain"),), says="each rank trains alone"
    ),
    Wrong(
        "horovod-classifier",
        "the rate of one rank",
        (("rate * scale", "rate"),),
        says="scale it by the number of ranks",
        fast=True,
    ),
    Wrong(
        "horovod-classifier",
        "no warm-up",
        (("min(1.0, (epoch * steps + step + 1) / steps)", "1"),),
        says="let it rise over the first epoch",
    ),
    Wrong("horovod-classifier", "one order", (("(seed + epoch)", "(seed)"),), says="the same order in each epoch"),
    Wrong("horovod-classifier", "same rows", ((ROWS, "[::size]"),), says="both ranks took the same images"),
    Wrong("horovod-classifier", "first rows", ((ROWS, "[:batch]"),), says="both ranks took the same images"),
    Wrong("horovod-classifier", "all rows", ((ROWS, ""),), says="its part is 48"),
    Wrong(
        "horovod-classifier",
        "a sum",
        (("named_parameters=model.named_parameters())", "named_parameters=model.named_parameters(), op=hvd.Sum)"),),
        says="a sum of the ranks' gradients",
    ),
    Wrong(
        "horovod-classifier",
        "own loss",
        (('hvd.allreduce(own, name="mean loss").item()', "own.item()"),),
        says="the means over all",
    ),
    Wrong(
        "horovod-classifier",
        "all ranks save",
        (("    if rank == 0:\n        torch.save", "    if True:\n        torch.save"),),
        says="rank 1 wrote ['model.pt']",
    ),
    Wrong(
        "horovod-classifier",
        "another name",
        (('folder / "model.pt"', 'folder / "weights.pt"'),),
        says="model.pt is asked for",
    ),
)
SETTINGS = (
    Wrong(
        "horovod-settings",
        "megabytes",
        (("str(min(job.memory, sum(job.gradients)))", "str(min(job.memory, sum(job.gradients)) // 2**20)"),),
        says="the variable counts bytes",
        fast=True,
    ),
    Wrong(
        "horovod-settings",
        "more than the memory",
        (("min(job.memory, sum(job.gradients))", "sum(job.gradients)"),),
        says="the buffer may take",
    ),
    Wrong(
        "horovod-settings",
        "default cycle",
        (('f"{job.backward_ms / job.messages:g}"', '"1"'),),
        says="one about every 18 ms",
    ),
    Wrong(
        "horovod-settings",
        "whole pass",
        (("job.backward_ms / job.messages", "job.backward_ms"),),
        says="one about every 18 ms",
    ),
    Wrong(
        "horovod-settings",
        "default cache",
        (("str(max(1024, len(job.gradients)))", '"1024"'),),
        says="negotiated again in each step",
    ),
    Wrong(
        "horovod-settings",
        "numbers",
        (("str(max(1024, len(job.gradients)))", "max(1024, len(job.gradients))"),),
        says="the environment holds text",
    ),
    Wrong(
        "horovod-settings",
        "always hierarchical",
        (("job.nccl and job.hosts > 1 and job.ranks_per_host > 1", "True"),),
        says="is on for",
    ),
    Wrong(
        "horovod-settings", "hierarchical with gloo", (("job.nccl and job.hosts > 1", "job.hosts > 1"),), says="gloo"
    ),
    Wrong(
        "horovod-settings",
        "one tensor each",
        (("                if not moving:\n                    found.append([])", "                found.append([])"),),
        says="travelled together",
    ),
    Wrong(
        "horovod-settings",
        "negotiations too",
        (('if event["name"] == "GLOO_ALLREDUCE":', 'if event["name"] in ("GLOO_ALLREDUCE", "ALLREDUCE"):'),),
        says="count the events GLOO_ALLREDUCE",
    ),
)
CALL = "            hvd.barrier()\n            began = time.perf_counter()\n"
MEDIAN = 'statistics.median(hvd.allgather(own, name=f"seconds {size}").amax(0).tolist())'
BENCHMARK = (
    Wrong(
        "horovod-benchmark",
        "warm-up counts",
        (("if number >= WARM_UP:", "if number >= 0:"), (MEDIAN, MEDIAN.replace("median", "fmean"))),
        says="the first two calls",
        fast=True,
    ),
    Wrong("horovod-benchmark", "not a number", ((MEDIAN, 'float("nan")'),), says="seconds is nan", fast=True),
    Wrong("horovod-benchmark", "mean", ((MEDIAN, MEDIAN.replace("median", "fmean")),), says="a single outlier moves"),
    Wrong(
        "horovod-benchmark", "own rank", ((MEDIAN, "statistics.median(seconds)"),), says="the median of the own rank"
    ),
    Wrong(
        "horovod-benchmark",
        "fastest",
        ((MEDIAN, MEDIAN.replace("statistics.median", "min")),),
        says="it is the fastest call",
    ),
    Wrong(
        "horovod-benchmark",
        "barrier timed",
        ((CALL, "            began = time.perf_counter()\n            hvd.barrier()\n"),),
        says="the barrier",
    ),
    Wrong(
        "horovod-benchmark",
        "no factor",
        (("2 * (ranks - 1) / ranks * size / median", "size * 2 / median"),),
        says="2 (n - 1) / n",
    ),
    Wrong(
        "horovod-benchmark",
        "nothing compared",
        (("wrong += int((summed != total).sum())", "wrong += 0"),),
        says="was changed on the way",
    ),
)
WRONG = (*HOSTS, *CLASSIFIER, *SETTINGS, *BENCHMARK)
RIGHT = (
    Right(
        "horovod-classifier",
        "gradients averaged by hand",
        '''
def train(model, images, labels, epochs, batch, rate, seed, folder):
    """One all-reduce per gradient, without DistributedOptimizer, and a contiguous part of each step."""
    rank, size = hvd.rank(), hvd.size()
    for name, value in model.state_dict().items():
        hvd.broadcast_(value, root_rank=0, name=name)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=MOMENTUM)
    steps, means = len(images) // (batch * size), []
    for epoch in range(epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed + epoch))
        losses = []
        for step in range(steps):
            done = min(steps, epoch * steps + step + 1)
            optimizer.param_groups[0]["lr"] = rate * (1 + (size - 1) * done / steps)
            first = step * batch * size + rank * batch
            rows = order[first : first + batch]
            loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            for number, parameter in enumerate(model.parameters()):
                hvd.allreduce_(parameter.grad, name=f"gradient {number}")
            optimizer.step()
            losses.append(hvd.allreduce(loss.detach(), name="loss"))
        means.append(torch.stack(losses).mean().item())
    if rank == 0:
        torch.save(model.state_dict(), folder / "model.pt")
    return means
''',
    ),
    Right(
        "horovod-settings",
        "a buffer for one message, and overlaps from the times",
        '''
def settings(job):
    """The buffer holds one message and a half."""
    held = min(job.memory, sum(job.gradients) * 3 // (2 * job.messages))
    chosen = {"HOROVOD_CYCLE_TIME": str(job.backward_ms / job.messages), "HOROVOD_FUSION_THRESHOLD": str(held)}
    chosen["HOROVOD_CACHE_CAPACITY"] = str(len(job.gradients) + 1024)
    both = job.nccl and min(job.hosts, job.ranks_per_host) > 1
    return {**chosen, "HOROVOD_HIERARCHICAL_ALLREDUCE": str(int(both))}
''',
    ),
    Right(
        "horovod-benchmark",
        "in place, asynchronous, a clock that was imported by its name",
        '''
from time import perf_counter


def benchmark(sizes, repeats):
    """Horovod's maximum over ranks instead of a gathered table."""
    rows = []
    for size in sizes:
        taken, wrong = torch.zeros(repeats, dtype=torch.float64), 0
        for number in range(-WARM_UP, repeats):
            tensor = torch.empty(size // 4).fill_(hvd.rank() + 1)
            hvd.barrier()
            began = perf_counter()
            hvd.synchronize(hvd.allreduce_async_(tensor, op=hvd.Sum, name="x"))
            if number >= 0:
                taken[number] = perf_counter() - began
                wrong += (tensor != sum(range(hvd.size() + 1))).sum().item()
        slowest = hvd.allgather(taken.view(1, -1), name="taken").max(dim=0).values
        seconds = slowest.median().item()
        rows.append(Row(size, seconds, 2 * (hvd.size() - 1) / hvd.size() * size / seconds, wrong))
    return rows
''',
    ),
)
