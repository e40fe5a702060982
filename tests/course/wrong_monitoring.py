"""Answers to template_monitoring.py: wrong ones with the message that each must get, and other right ones."""

from __future__ import annotations

from wrong import Right, Wrong

ROW = "row = [torch.as_tensor(values[name]).detach().clone() for name in self.names]"
MEAN = "mean = (values * samples).sum() / samples.sum()"
GATHER = "        dist.all_gather(gathered, own)\n        every = torch.cat(gathered)\n"
METRICS = (
    Wrong(
        "metrics-over-ranks",
        "mean of the steps",
        ((MEAN, "mean = values.mean()"),),
        says="weighted by samples it is",
        fast=True,
    ),
    Wrong(
        "metrics-over-ranks",
        "mean of the means",
        ((MEAN, "mean = torch.stack([values[ranks == rank].mean() for rank in range(int(ranks.max()) + 1)]).mean()"),),
        says="weighted by samples it is",
    ),
    Wrong(
        "metrics-over-ranks",
        "own rank only",
        ((GATHER, "        dist.all_gather(gathered, own)\n        every = own\n"),),
        says="holds the steps of this rank only",
    ),
    Wrong(
        "metrics-over-ranks",
        "own rank only for the range",
        (
            (
                "values.min().item(), values.max().item()",
                "values[ranks == dist.get_rank()].min().item(), values.max().item()",
            ),
        ),
        says="the smallest value of all steps of all ranks",
    ),
    Wrong(
        "metrics-over-ranks",
        "a collective per step",
        (("        self.rows.append(", "        dist.all_reduce(row[0].clone())\n        self.rows.append("),),
        says="a step must not communicate for metrics",
        fast=True,
    ),
    Wrong(
        "metrics-over-ranks",
        "a collective per metric",
        (
            (
                GATHER,
                "        for column in own.T:\n"
                "            dist.all_gather([torch.empty_like(column) for _ in gathered], column.contiguous())\n"
                + GATHER,
            ),
        ),
        says="one collective per report is enough",
    ),
    Wrong(
        "metrics-over-ranks",
        "an own collective for the count",
        ((GATHER, "        dist.all_reduce(torch.tensor(len(own)))\n" + GATHER),),
        says="two reports made 4 calls",
    ),
    Wrong(
        "metrics-over-ranks",
        "item in every step",
        ((ROW, "row = [torch.as_tensor(float(values[name])) for name in self.names]"),),
        says="waits until all work that is queued is done",
    ),
    Wrong(
        "metrics-over-ranks",
        "cpu in every step",
        ((ROW, "row = [torch.as_tensor(values[name]).detach().cpu().clone() for name in self.names]"),),
        says="waits until all work that is queued is done",
    ),
    Wrong(
        "metrics-over-ranks",
        "graph kept",
        ((ROW, ROW.replace(".detach()", "")),),
        says="the graph of a loss lives after add()",
    ),
    Wrong("metrics-over-ranks", "no copy", ((ROW, ROW.replace(".clone()", "")),), says="keep a copy"),
    Wrong(
        "metrics-over-ranks",
        "window not emptied",
        (("        self.rows = []\n        gathered", "        gathered"),),
        says="begin a new interval",
    ),
    Wrong(
        "metrics-over-ranks",
        "padding counted",
        (
            ("used = ~every[:, 0].isnan()", "used = torch.ones(len(every), dtype=torch.bool)"),
            ("torch.nan, dtype", "0.0, dtype"),
        ),
        says="the smallest value of all steps",
    ),
    Wrong(
        "metrics-over-ranks",
        "row for rank",
        (("rank = int(ranks[values.argmax()])", "rank = int(values.argmax())"),),
        says="the rank that had the largest value",
    ),
    Wrong(
        "metrics-over-ranks",
        "own rank for rank",
        (("rank = int(ranks[values.argmax()])", "rank = dist.get_rank()"),),
        says="the rank that had the largest value",
    ),
    Wrong(
        "metrics-over-ranks",
        "percentile of 0.9",
        (("[0.5, 0.95]", "[0.5, 0.9]"),),
        says="95% of the values of all ranks",
    ),
    Wrong(
        "metrics-over-ranks",
        "mean for median",
        (("rank, p50, p95)", "rank, values.mean().item(), p95)"),),
        says="the median over the steps",
    ),
    Wrong(
        "metrics-over-ranks",
        "as many rows as own steps",
        (("torch.full((self.capacity, 1", "torch.full((len(self.rows), 1"),),
        says="must have one shape",
    ),
)

TIMED = """        began = time.perf_counter()
        compute()
        computed = time.perf_counter()
        communicate()
"""
USUAL = "usual = compute.quantile(0.5, dim=1)"
SLOWDOWN = "slowdown = usual / usual.quantile(0.5)"
LOST = "lost = compute.amax(0) - compute[~slow].amax(0)"
STRAGGLERS = (
    Wrong(
        "find-stragglers",
        "blames the waiting",
        (("slow = slowdown > self.factor", "usual = waiting.mean(1)\n        slow = usual == usual.max()"),),
        says="Judge by compute time",
        fast=True,
    ),
    Wrong(
        "find-stragglers",
        "whole steps",
        ((USUAL, "usual = (compute + waiting).quantile(0.5, dim=1)"),),
        says="computes 1.8 times as long as the others, and [] is named",
    ),
    Wrong(
        "find-stragglers",
        "a mean over steps",
        ((USUAL, "usual = compute.mean(1)"),),
        says="a mean follows one outlier",
        fast=True,
    ),
    Wrong(
        "find-stragglers", "the largest step", ((USUAL, "usual = compute.amax(1)"),), says="a mean follows one outlier"
    ),
    Wrong(
        "find-stragglers",
        "against the fastest",
        ((SLOWDOWN, "slowdown = usual / usual.min()"),),
        says="compare with the median rank",
    ),
    Wrong(
        "find-stragglers",
        "against the mean of ranks",
        ((SLOWDOWN, "slowdown = usual / usual.mean()"),),
        says="which slow ranks do not move",
    ),
    Wrong(
        "find-stragglers",
        "always one",
        (("slow = slowdown > self.factor", "slow = slowdown == slowdown.max()"),),
        says="there is not always a straggler",
    ),
    Wrong(
        "find-stragglers",
        "only the worst",
        (("slow = slowdown > self.factor", "slow = (slowdown > self.factor) & (slowdown == slowdown.max())"),),
        says="ranks 1, 4 and 5 of 7",
    ),
    Wrong(
        "find-stragglers",
        "a fixed limit",
        (("slow = slowdown > self.factor", "slow = slowdown > 2.0"),),
        says="factor is 1.3",
    ),
    Wrong(
        "find-stragglers", "lost is a sum", (("lost.mean().item()", "lost.sum().item()"),), says="the mean over steps"
    ),
    Wrong(
        "find-stragglers",
        "lost is all waiting",
        ((LOST, "lost = waiting.sum(0)"),),
        says="the slowest of all minus the slowest of the ranks that are not named",
    ),
    Wrong(
        "find-stragglers",
        "transfer is the mean waiting",
        (("transfer = waiting.amin(0)", "transfer = waiting.mean(0)"),),
        says="the smallest waiting time of a step is the communication itself",
    ),
    Wrong(
        "find-stragglers",
        "seconds for slowdown",
        (("rank: slowdown[rank].item()", "rank: usual[rank].item()"),),
        says="times the usual compute time",
    ),
    Wrong(
        "find-stragglers",
        "communication in the compute time",
        (
            (
                TIMED,
                TIMED.replace("        communicate()\n", "").replace(
                    "        compute()\n", "        compute()\n        communicate()\n"
                ),
            ),
        ),
        says="measure compute() and communicate() apart",
    ),
    Wrong(
        "find-stragglers",
        "old steps are kept",
        (("        self.times = []\n        every", "        every"),),
        says="each report begins a new interval",
    ),
    Wrong(
        "find-stragglers",
        "a collective per step",
        (("        self.times.append(", "        dist.barrier()\n        self.times.append("),),
        says="one per report is enough",
    ),
    Wrong(
        "find-stragglers",
        "own table",
        (
            (
                "        compute, waiting = torch.stack(every).unbind(2)\n",
                "        compute, waiting = torch.stack([own] * len(every)).unbind(2)\n",
            ),
        ),
        says="on real ranks",
    ),
)

FINALLY = """        try:
            yield
        finally:
            seconds = self.clock() - began
"""
COUNTED = "        self.steps += 1\n"
PROFILER = (
    Wrong(
        "profile-step",
        "inner parts counted twice",
        (("own = seconds - self.inner.pop()", "own = seconds - self.inner.pop() * (name == 'other')"),),
        says="counts for the inner part alone",
        fast=True,
    ),
    Wrong(
        "profile-step",
        "only one depth",
        (("                self.inner[-1] += seconds\n", "                self.inner[-1] += own\n"),),
        says="counts for the inner part alone",
    ),
    Wrong(
        "profile-step",
        "not closed after an exception",
        (
            (
                "        try:\n            yield\n        finally:\n            seconds",
                "        yield\n        if True:\n            seconds",
            ),
        ),
        says="'data'",
        fast=True,
    ),
    Wrong(
        "profile-step",
        "exception swallowed",
        (
            (
                "            yield\n        finally:\n",
                "            yield\n        except Exception:\n            pass\n        finally:\n",
            ),
        ),
        says="was swallowed",
    ),
    Wrong(
        "profile-step",
        "last one counts",
        (("self.current[name] = self.current.get(name, 0.0) + own", "self.current[name] = own"),),
        says="a part that comes 3 times adds up",
    ),
    Wrong(
        "profile-step", "sums for means", (("seconds / self.steps for", "seconds for"),), says="the mean over the steps"
    ),
    Wrong(
        "profile-step",
        "mean over steps that have it",
        (
            ("seconds / self.steps for", "seconds / self.counts[name] for"),
            ("        self.current: dict", "        self.counts: dict[str, int] = {}\n        self.current: dict"),
            (
                "            self.totals[name] = ",
                "            self.counts[name] = self.counts.get(name, 0) + 1\n            self.totals[name] = ",
            ),
        ),
        says="divide by all steps",
    ),
    Wrong(
        "profile-step",
        "no rest",
        (('        return {**parts, "step"', '        parts.pop("other")\n        return {**parts, "step"'),),
        says="the time of the step that is in none of its parts",
    ),
    Wrong(
        "profile-step",
        "no step",
        (('return {**parts, "step": sum(parts.values())}', "return parts"),),
        says="summary() has no 'step'",
    ),
    Wrong(
        "profile-step",
        "another clock",
        (("seconds = self.clock() - began", "seconds = time.perf_counter() - began"),),
        says="summary() gives",
    ),
    Wrong(
        "profile-step",
        "failed steps count",
        (
            (
                '        with self.part("other"):\n            yield\n        self.steps += 1\n',
                '        self.steps += 1\n        with self.part("other"):\n            yield\n',
            ),
        ),
        says="a step that an exception ended is not counted",
    ),
    Wrong(
        "profile-step",
        "parts of failed steps count",
        (
            (
                "            self.current[name] = self.current.get(name, 0.0) + own\n",
                "            self.totals[name] = self.totals.get(name, 0.0) + own\n",
            ),
        ),
        says="a step that an exception ended is not counted",
    ),
    Wrong(
        "profile-step",
        "a list of every part",
        (
            (
                "            own = seconds",
                "            self.__dict__.setdefault('events', []).append((name, began, seconds))\n"
                "            own = seconds",
            ),
        ),
        says="keep sums, not a record of every step",
    ),
    Wrong(
        "profile-step",
        "slow",
        (("        self.inner.append(0.0)\n", "        self.inner.append(0.0)\n        time.sleep(0.0002)\n"),),
        says="µs",
    ),
)

KEEP = "        flat[indices] = 0.0\n        self.residuals[name] = total\n"
ROUNDED = "rounded = (exact + torch.rand_like(exact)).floor()"
COMPRESSION = (
    Wrong(
        "compress-gradients",
        "no error feedback",
        (("        self.residuals[name] = total\n", "        self.residuals[name] = torch.zeros_like(total)\n"),),
        says="what is not sent is lost",
        fast=True,
    ),
    Wrong(
        "compress-gradients",
        "residual never added",
        (("            total += self.residuals[name].to(total.device)\n", "            pass\n"),),
        says="sent plus residual differs by",
    ),
    Wrong(
        "compress-gradients",
        "sent entries kept",
        (("        flat[indices] = 0.0\n", ""),),
        says="they will be sent twice",
    ),
    Wrong(
        "compress-gradients",
        "one residual for all names",
        (
            (
                "        self.residuals[name] = total\n",
                "        self.residuals = {key: total for key in ('weight', 'other', 'x', name)}\n",
            ),
        ),
        says="keep one for each name",
    ),
    Wrong(
        "compress-gradients",
        "largest values without abs",
        (("flat.abs().topk(count)", "flat.topk(count)"),),
        says="compare absolute values",
    ),
    Wrong(
        "compress-gradients",
        "count of zero",
        (("count = max(1, int(flat.numel() * self.fraction))", "count = int(flat.numel() * self.fraction)"),),
        says="send at least one entry",
    ),
    Wrong(
        "compress-gradients",
        "works in the gradient",
        (("total = gradient.detach().clone()", "total = gradient.detach()"),),
        says="changed the gradient",
    ),
    Wrong(
        "compress-gradients",
        "the wrong fraction",
        (("flat.numel() * self.fraction", "flat.numel() * (1 - self.fraction)"),),
        says="with fraction=0.1 it is",
    ),
    Wrong(
        "compress-gradients",
        "sum over ranks",
        (("result.view_as(gradient) / world", "result.view_as(gradient)"),),
        says="returns the sum over 3 ranks",
    ),
    Wrong(
        "compress-gradients",
        "places of the own rank",
        (("torch.cat(all_places).long(), torch", "indices.repeat(world), torch"),),
        says="at the places that this rank sent",
    ),
    Wrong(
        "compress-gradients",
        "later ranks overwrite",
        (
            (
                "result.index_add_(0, torch.cat(all_places).long(), torch.cat(all_values))",
                "result[torch.cat(all_places).long()] = torch.cat(all_values)",
            ),
        ),
        says="both count",
    ),
    Wrong(
        "compress-gradients",
        "whole gradient on the wire",
        (
            (
                "        all_values = [",
                "        dense = torch.zeros(gradient.numel())\n"
                "        dense[indices] = values\n"
                "        dist.all_reduce(dense)\n"
                "        return dense.view_as(gradient) / world\n"
                "        all_values = [",
            ),
        ),
        says="send values and places",
        fast=True,
    ),
    Wrong(
        "compress-gradients",
        "rounds to nearest",
        ((ROUNDED, "rounded = exact.round()"),),
        says="rounding to the nearest is wrong in the same way",
    ),
    Wrong(
        "compress-gradients", "always rounds down", ((ROUNDED, "rounded = exact.floor()"),), says="300 quantizations"
    ),
    Wrong(
        "compress-gradients",
        "overflow",
        (("gradient.abs().max() / 127", "gradient.abs().max() / 200"), ("rounded.clamp(-127, 127).to", "rounded.to")),
        says="check the scale",
    ),
    Wrong(
        "compress-gradients",
        "division by zero",
        (
            ("        if scale == 0:\n            return torch.zeros_like(gradient, dtype=torch.int8), scale\n", ""),
            ("return values.float() * scale", "return values.float() * (1.0 if scale == 0 else scale)"),
            ("rounded.clamp(-127, 127)", "rounded.nan_to_num(1.0).clamp(-127, 127)"),
        ),
        says="a gradient of zeros comes back",
    ),
    Wrong(
        "compress-gradients",
        "no scale on the way back",
        (("return values.float() * scale", "return values.float()"),),
        says="check the scale",
    ),
    Wrong(
        "compress-gradients",
        "int16",
        (("rounded.clamp(-127, 127).to(torch.int8)", "rounded.clamp(-127, 127).to(torch.int16)"),),
        says="it should be int8",
    ),
    Wrong(
        "compress-gradients",
        "no clamp",
        (("rounded.clamp(-127, 127).to(torch.int8)", "rounded.to(torch.int8)"),),
        says="Clamp to -127 and 127",
        fast=True,
    ),
    Wrong(
        "compress-gradients",
        "places of 8 bytes",
        (("places = indices.to(torch.int32)", "places = indices"),),
        says="no 8-byte places",
    ),
    Wrong(
        "compress-gradients",
        "pickled tensors",
        (
            (
                "        dist.all_gather(all_values, values)\n        dist.all_gather(all_places, places)\n",
                "        pairs = [None] * world\n"
                "        dist.all_gather_object(pairs, (values, places))\n"
                "        all_values, all_places = zip(*pairs)\n",
            ),
        ),
        says="no pickled tensors",
    ),
    Wrong(
        "compress-gradients",
        "average returns nothing",
        (("        return result.view_as(gradient) / world\n", ""),),
        says="it should return the mean, a tensor",
    ),
)

WRONG = (*METRICS, *STRAGGLERS, *PROFILER, *COMPRESSION)

RIGHT = (
    Right(
        "metrics-over-ranks",
        "one tensor that is filled",
        """
class MetricWindow:
    def __init__(self, names, capacity):
        self.names = list(names)
        self.table = torch.zeros(capacity, len(self.names) + 1, dtype=torch.double)
        self.count = 0

    @torch.no_grad()
    def add(self, samples, **values):
        self.table[self.count, 0] = samples
        for column, name in enumerate(self.names, 1):
            self.table[self.count, column] = values[name]
        self.count += 1

    def reduce(self):
        everything = [torch.zeros_like(self.table) for _ in range(dist.get_world_size())]
        dist.all_gather(everything, self.table)
        self.table, self.count = torch.zeros_like(self.table), 0
        rows = [(rank, *row) for rank, table in enumerate(everything) for row in table.tolist() if row[0]]
        return {name: self.one(rows, column) for column, name in enumerate(self.names, 2)}

    def one(self, rows, column):
        values = torch.tensor([row[column] for row in rows], dtype=torch.double)
        mean = sum(row[1] * row[column] for row in rows) / sum(row[1] for row in rows)
        top = max(rows, key=lambda row: row[column])
        p50, p95 = values.quantile(0.5).item(), values.quantile(0.95).item()
        return Summary(mean, values.min().item(), top[column], top[0], p50, p95)
""",
    ),
    Right(
        "metrics-over-ranks",
        "an all-reduce into places of a zero tensor",
        """
class MetricWindow:
    def __init__(self, names, capacity):
        self.names, self.capacity, self.kept = names, capacity, []

    def add(self, samples, **values):
        kept = {}
        for name, value in values.items():
            kept[name] = value.detach().clone() if isinstance(value, Tensor) else value
        self.kept.append((samples, kept))

    def reduce(self):
        rank, world = dist.get_rank(), dist.get_world_size()
        table = torch.zeros(world, self.capacity, len(self.names) + 1, dtype=torch.float64)
        for number, (samples, values) in enumerate(self.kept):
            table[rank, number] = torch.tensor([samples] + [float(values[name]) for name in self.names])
        self.kept = []
        dist.all_reduce(table)
        result = {}
        where = table[:, :, 0] > 0
        owner = torch.arange(world)[:, None].expand(world, self.capacity)[where]
        for number, name in enumerate(self.names):
            values, weights = table[:, :, number + 1][where], table[:, :, 0][where]
            largest = int(values.argmax())
            result[name] = Summary(
                float((values * weights).sum() / weights.sum()),
                float(values.min()),
                float(values[largest]),
                int(owner[largest]),
                float(values.quantile(0.5)),
                float(values.quantile(0.95)),
            )
        return result
""",
    ),
    Right(
        "find-stragglers",
        "lists and the statistics module",
        """
from statistics import fmean, median


class StragglerWatch:
    def __init__(self, factor=1.3):
        self.factor, self.compute, self.wait = factor, [], []

    def step(self, compute, communicate):
        start = time.monotonic()
        compute()
        self.compute.append(time.monotonic() - start)
        start = time.monotonic()
        communicate()
        self.wait.append(time.monotonic() - start)

    def report(self):
        own, self.compute, self.wait = torch.tensor([self.compute, self.wait]), [], []
        every = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(every, own)
        return self.judge(torch.stack([each[0] for each in every]), torch.stack([each[1] for each in every]))

    def judge(self, compute, waiting):
        compute, waiting = compute.tolist(), waiting.tolist()
        typical = [median(row) for row in compute]
        middle = median(typical)
        slow = [rank for rank, seconds in enumerate(typical) if seconds / middle > self.factor]
        rest = [row for rank, row in enumerate(compute) if rank not in slow]
        lost = fmean(max(step) - max(other) for step, other in zip(zip(*compute), zip(*rest)))
        return Stragglers(slow, {rank: typical[rank] / middle for rank in slow}, lost, fmean(map(min, zip(*waiting))))
""",
    ),
    Right(
        "find-stragglers",
        "statistics.median and an all-reduce",
        """
class StragglerWatch:
    def __init__(self, factor=1.3):
        self.factor, self.times = factor, []

    def step(self, compute, communicate):
        marks = [time.perf_counter()]
        for part in (compute, communicate):
            part()
            marks.append(time.perf_counter())
        self.times.append([marks[1] - marks[0], marks[2] - marks[1]])

    def report(self):
        table = torch.zeros(dist.get_world_size(), len(self.times), 2)
        table[dist.get_rank()] = torch.tensor(self.times)
        self.times = []
        dist.all_reduce(table)
        return self.judge(table[..., 0], table[..., 1])

    def judge(self, compute, waiting):
        import statistics

        typical = torch.tensor([statistics.median(row) for row in compute.tolist()])
        ratio = typical / statistics.median(typical.tolist())
        ranks = [rank for rank in range(len(ratio)) if ratio[rank] > self.factor]
        healthy = [rank for rank in range(len(ratio)) if rank not in ranks]
        lost = (compute.max(0).values - compute[healthy].max(0).values).mean()
        ratios = {rank: float(ratio[rank]) for rank in ranks}
        return Stragglers(ranks, ratios, float(lost), float(waiting.min(0).values.mean()))
""",
    ),
    Right(
        "profile-step",
        "classes with enter and exit",
        """
class _Part:
    def __init__(self, profiler, name):
        self.profiler, self.name = profiler, name

    def __enter__(self):
        self.profiler.change(self.name)

    def __exit__(self, *error):
        self.profiler.change(None)


class StepProfiler:
    def __init__(self, clock=time.perf_counter):
        self.clock, self.count, self.sums = clock, 0, {}

    @contextmanager
    def step(self):
        self.names, self.now, self.since = ["other"], {"other": 0.0}, self.clock()
        yield
        self.charge()
        self.count += 1
        for name, seconds in self.now.items():
            self.sums[name] = self.sums.get(name, 0.0) + seconds

    def charge(self):
        moment = self.clock()
        self.now[self.names[-1]] = self.now.get(self.names[-1], 0.0) + moment - self.since
        self.since = moment

    def change(self, name):
        self.charge()
        if name is None:
            self.names.pop()
        else:
            self.names.append(name)

    def part(self, name):
        return _Part(self, name)

    def summary(self):
        result = {name: seconds / self.count for name, seconds in self.sums.items()}
        result["step"] = sum(self.sums.values()) / self.count
        return result
""",
    ),
    Right(
        "profile-step",
        "the rest by subtraction",
        """
class StepProfiler:
    def __init__(self, clock=time.perf_counter):
        self.clock, self.finished, self.whole, self.parts = clock, 0, 0.0, {}
        self.open, self.children = {}, [0.0]

    @contextmanager
    def step(self):
        self.open, self.children = {}, [0.0]
        start = self.clock()
        yield
        self.whole += self.clock() - start
        self.finished += 1
        for name in self.open:
            self.parts.setdefault(name, 0.0)
            self.parts[name] += self.open[name]

    @contextmanager
    def part(self, name):
        start = self.clock()
        self.children.append(0.0)
        try:
            yield
        finally:
            length = self.clock() - start
            self.open.setdefault(name, 0.0)
            self.open[name] += length - self.children.pop()
            self.children[-1] += length

    def summary(self):
        per_step = {name: total / self.finished for name, total in self.parts.items()}
        step = self.whole / self.finished
        return {**per_step, "other": step - sum(per_step.values()), "step": step}
""",
    ),
    Right(
        "compress-gradients",
        "a mask, and one message with both",
        """
class GradientCompressor:
    def __init__(self, fraction):
        self.fraction, self.residuals = fraction, {}

    def compress(self, name, gradient):
        total = gradient + self.residuals.get(name, torch.zeros_like(gradient))
        number = max(int(gradient.numel() * self.fraction), 1)
        order = total.flatten().abs().argsort(descending=True)[:number]
        mask = torch.zeros(total.numel(), dtype=torch.bool)
        mask[order] = True
        self.residuals[name] = total.masked_fill(mask.view_as(total), 0.0)
        return total.flatten()[order], order

    def average(self, name, gradient):
        values, order = self.compress(name, gradient)
        message = torch.cat([values.view(torch.int32), order.int()])
        messages = [torch.zeros_like(message) for _ in range(dist.get_world_size())]
        dist.all_gather(messages, message)
        result = torch.zeros_like(gradient).flatten()
        for each in messages:
            first, second = each.chunk(2)
            result[second.long()] += first.view(torch.float32) / len(messages)
        return result.reshape(gradient.shape)

    @staticmethod
    def quantize(gradient):
        scale = gradient.abs().max().clamp(min=1e-20) / 127
        low = (gradient / scale).floor()
        up = torch.rand(gradient.shape) < gradient / scale - low
        return (low + up).clamp(-127, 127).to(torch.int8), scale

    @staticmethod
    def dequantize(values, scale):
        return values * scale
""",
    ),
    Right(
        "compress-gradients",
        "objects on the wire, dither for the rounding",
        """
class GradientCompressor:
    def __init__(self, fraction):
        self.fraction = fraction
        self.residuals = {}

    def compress(self, name, gradient):
        rest = gradient.clone()
        rest += self.residuals.setdefault(name, torch.zeros_like(gradient))
        places = torch.topk(rest.abs().reshape(-1), max(1, int(rest.numel() * self.fraction)))[1]
        values = rest.reshape(-1)[places].clone()
        rest.reshape(-1)[places] -= values
        self.residuals[name] = rest
        return values, places

    def average(self, name, gradient):
        pairs = [None] * dist.get_world_size()
        values, places = self.compress(name, gradient)
        dist.all_gather_object(pairs, (values.numpy().tobytes(), places.int().numpy().tobytes()))
        total = torch.zeros(gradient.numel())
        for values, places in pairs:
            where = torch.frombuffer(bytearray(places), dtype=torch.int32).long()
            total.scatter_add_(0, where, torch.frombuffer(bytearray(values), dtype=torch.float32))
        return (total / len(pairs)).view(gradient.shape)

    @staticmethod
    def quantize(gradient):
        largest = gradient.abs().max()
        scale = largest / 127 if largest > 0 else torch.tensor(1.0)
        dither = torch.rand_like(gradient) - 0.5
        return torch.clamp(torch.round(gradient / scale + dither), -127, 127).to(torch.int8), scale

    @staticmethod
    def dequantize(values, scale):
        return values.to(torch.float32).mul(scale)
""",
    ),
)
