"""Answers to the practical assessment: wrong ones with the message that each must get, and other right ones."""

from __future__ import annotations

from wrong import Right, Wrong

BROADCAST = "            dist.broadcast(tensor.data, src=0)\n"
RESTORED = '        self._optimizer.load_state_dict(found[0]["optimizer"])\n'
REDUCE = "        dist.all_reduce(flat)\n"
SUM = 'total = nn.functional.mse_loss(self._model(inputs[mine]), targets[mine], reduction="sum")'
SCALE = "scale = len(rows) * targets[0].numel()"

CORRECT = (
    Wrong(
        "assessment-correct",
        "plain mean",
        ((SUM, "total = nn.functional.mse_loss(self._model(inputs[mine]), targets[mine])"), (SCALE, "scale = world")),
        says="weight each rank by its samples",
        fast=True,
    ),
    Wrong(
        "assessment-correct",
        "weights of each rank",
        ((BROADCAST, "            pass\n"),),
        says="the weights differ from one process",
    ),
    Wrong(
        "assessment-correct",
        "same order in each epoch",
        (("manual_seed(seed + epoch)", "manual_seed(seed)"),),
        says="differs first",
    ),
    Wrong(
        "assessment-correct",
        "no order",
        (("rows.append(order[within])", "rows.append(within)"),),
        says="the loss of step 0 differs first",
    ),
    Wrong(
        "assessment-correct",
        "own loss",
        (("return float(flat[-1])", "return float(total) / len(mine) / targets[0].numel()"),),
        says="it is the mean over the global batch",
    ),
    Wrong("assessment-correct", "no exchange", ((REDUCE, ""),), says="the weights differ from one process"),
    Wrong(
        "assessment-correct",
        "gradients add up",
        (("        self._optimizer.zero_grad()\n", ""),),
        says="the weights differ from one process",
    ),
    Wrong(
        "assessment-correct",
        "no momentum",
        (("lr=learning_rate, momentum=momentum", "lr=learning_rate"),),
        says="the weights differ from one process",
    ),
)
RECOVERY = (
    Wrong(
        "assessment-recovery",
        "no momentum in the file",
        ((RESTORED, ""),),
        says="the momentum, or the position in the data",
        fast=True,
    ),
    Wrong(
        "assessment-recovery",
        "never restores",
        (("begin = self._restore()", "begin = 0"),),
        says="instead of continuing from a checkpoint",
    ),
    Wrong(
        "assessment-recovery",
        "never saves",
        (("if (step + 1) % checkpoint_every == 0:", "if False:"),),
        says="the folder is empty",
    ),
    Wrong(
        "assessment-recovery",
        "step too far",
        (('return int(found[0]["step"])', 'return int(found[0]["step"]) + 1'),),
        says="the weights differ from a run without failures",
    ),
    Wrong(
        "assessment-recovery",
        "data from the beginning",
        (("rows_of(step, len(inputs)", "rows_of(step - begin, len(inputs)"),),
        says="the momentum, or the position in the data",
    ),
    Wrong(
        "assessment-recovery",
        "weights on rank 0 only",
        (
            (
                '        self._model.load_state_dict(found[0]["model"])\n',
                '        if dist.get_rank() == 0:\n            self._model.load_state_dict(found[0]["model"])\n',
            ),
        ),
        says="the weights differ from a run without failures",
    ),
    Wrong(
        "assessment-recovery",
        "one file only",
        (("_KEPT = 2", "_KEPT = 1"),),
        says="instead of continuing from a checkpoint",
    ),
)
BYTES = (
    Wrong(
        "assessment-bytes",
        "weights in each step",
        (
            (
                "        self._optimizer.step()\n",
                "        self._optimizer.step()\n        for parameter in self._parameters:\n"
                "            dist.broadcast(parameter.data, src=0)\n",
            ),
        ),
        says="do not send weights in each step",
        fast=True,
    ),
    Wrong(
        "assessment-bytes",
        "twice",
        ((REDUCE, REDUCE + "        dist.all_reduce(flat.clone())\n"),),
        says="times the gradients'",
    ),
    Wrong(
        "assessment-bytes",
        "a gather of all",
        (
            (
                REDUCE,
                "        every = [torch.empty_like(flat) for _ in range(world)]\n        dist.all_gather(every, flat)\n"
                "        dist.all_gather(every, flat)\n        flat = torch.stack(every).sum(0)\n",
            ),
        ),
        says="times the gradients'",
    ),
)
ONE_BY_ONE = (
    "        dist.all_reduce(flat[-1:])\n        for parameter in self._parameters:\n"
    "            dist.all_reduce(parameter.grad)\n"
    "        flat = torch.cat([parameter.grad.flatten() for parameter in self._parameters] + [flat[-1:]])\n"
)
THROUGHPUT = (
    Wrong(
        "assessment-throughput",
        "one by one",
        ((REDUCE, ONE_BY_ONE),),
        says="put gradients into buckets",
        fast=True,
    ),
    Wrong(
        "assessment-throughput",
        "slow host",
        ((REDUCE, "        import time\n\n        time.sleep(0.05)\n" + REDUCE),),
        says="3 times faster than that is asked for",
    ),
)
WRONG = (*CORRECT, *RECOVERY, *BYTES, *THROUGHPUT)

RIGHT = (
    Right(
        "assessment-correct",
        "rows by a whole order",
        '''
def rows_of(step: int, count: int, global_batch: int, seed: int) -> list[int]:
    """Return the rows of a step."""
    epochs = (step + 1) * global_batch // count + 1
    order = [
        row
        for epoch in range(epochs)
        for row in torch.randperm(count, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
    ]
    return order[step * global_batch : (step + 1) * global_batch]
''',
    ),
    Right(
        "assessment-recovery",
        "torch reads damaged files itself",
        '''
def newest(folder: Path) -> dict[str, Any] | None:
    """Return the newest checkpoint that can be read."""
    for path in sorted(folder.glob("step-*.checkpoint"), reverse=True):
        try:
            return torch.load(io.BytesIO(path.read_bytes()[4:]))
        except Exception:
            continue
    return None
''',
    ),
)
