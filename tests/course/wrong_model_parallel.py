"""Wrong and other right answers for template_model_parallel.py."""

from __future__ import annotations

from wrong import Right, Wrong

BUILD = "range(first, end)))"
STEP_SEND = (
    "            dist.send(outputs.detach(), self.rank + 1)\n"
    "            outputs.backward(receive(shape, self.rank + 1))\n"
)
STEP_BACK = "        if not is_first:\n            dist.send(inputs.grad, self.rank - 1)\n"
PIPE_SEND = "                sends.append(dist.isend(left.detach(), rank + 1))\n"
PIPE_BACK = "                sends.append(dist.isend(entered.grad, rank - 1))\n"
PIPE_WAIT = "    for send in sends:\n        send.wait()\n"
WARM_UP = "warm_up = min(stages - stage - 1, micro_batches)"
PAIRS = '        actions += [("F", warm_up + number), ("B", number)]\n'
COOL = '    actions += [("B", number) for number in range(micro_batches - warm_up, micro_batches)]\n'
ENTER = "        total = gradient.clone()\n        dist.all_reduce(total)\n        return total\n"
LEAVE = "        total = part.clone()\n        dist.all_reduce(total)\n        return total\n"
LAST_LINE = "return LeaveSplit.apply(part) + self.row_bias"

WRONG = (
    # split-model
    Wrong(
        "split-model",
        "builds all layers",
        (
            (
                "        self.layers = nn.Sequential(*(build(number) for number in range(first, end)))",
                "        self.layers = nn.Sequential(*[build(number) for number in range(count)][first:end])",
            ),
        ),
        says="builds all",
        fast=True,
    ),
    Wrong(
        "split-model",
        "loses the last layer",
        (
            ("first = count * self.rank // self.world", "first = count // self.world * self.rank"),
            ("end = count * (self.rank + 1) // self.world", "end = first + count // self.world"),
        ),
        says="is on no rank",
    ),
    Wrong(
        "split-model",
        "gives the rest to the last rank",
        (
            ("first = count * self.rank // self.world", "first = count // self.world * self.rank"),
            (
                "end = count * (self.rank + 1) // self.world",
                "end = count if self.rank == self.world - 1 else first + count // self.world",
            ),
        ),
        says="may differ by one at most",
    ),
    Wrong(
        "split-model",
        "deals the layers out",
        ((BUILD, "range(self.rank, count, self.world)))"),),
        says="they must be neighbours",
    ),
    Wrong(
        "split-model",
        "the first layers on the last rank",
        (
            ("first = count * self.rank // self.world", "first = count * (self.world - 1 - self.rank) // self.world"),
            ("end = count * (self.rank + 1) // self.world", "end = count * (self.world - self.rank) // self.world"),
        ),
        says="rank 0 must hold the first layers",
    ),
    Wrong(
        "split-model",
        "received without requires_grad",
        (("receive(shape, self.rank - 1).requires_grad_()", "receive(shape, self.rank - 1)"),),
        says="unless requires_grad_() was called",
        fast=True,
    ),
    Wrong(
        "split-model",
        "no gradient travels",
        ((STEP_SEND, "            dist.send(outputs.detach(), self.rank + 1)\n"), (STEP_BACK, "")),
        says="are None: backward did not run",
    ),
    Wrong(
        "split-model",
        "backward starts from ones",
        (
            (
                "            outputs.backward(receive(shape, self.rank + 1))\n",
                "            received = receive(shape, self.rank + 1)\n"
                "            outputs.backward(torch.ones_like(received))\n",
            ),
        ),
        says="does backward start from it",
    ),
    Wrong(
        "split-model",
        "the loss is a sum",
        (
            (
                "            loss = F.mse_loss(outputs, targets)\n            loss.backward()",
                "            loss = F.mse_loss(outputs, targets)\n"
                "            F.mse_loss(outputs, targets, reduction='sum').backward()",
            ),
        ),
        says="is the loss the mean over all elements",
    ),
    Wrong(
        "split-model",
        "sends the activations back",
        (("dist.send(inputs.grad, self.rank - 1)", "dist.send(inputs.detach(), self.rank - 1)"),),
        says="the gradient you send that of what you received",
    ),
    Wrong(
        "split-model",
        "clears the gradients",
        (("        is_first, is_last =", "        self.layers.zero_grad()\n        is_first, is_last ="),),
        says="add to .grad, do not clear it",
    ),
    Wrong(
        "split-model",
        "returns the loss with its history",
        (("return loss.detach() if is_last else None", "return loss if is_last else None"),),
        says="return it detached",
    ),
    Wrong(
        "split-model",
        "returns something on every rank",
        (("return loss.detach() if is_last else None", "return loss.detach() if is_last else torch.zeros(())"),),
        says="only the last rank knows it",
    ),
    Wrong(
        "split-model",
        "waits for the gradient before it sends",
        (
            (
                STEP_SEND,
                "            received = receive(shape, self.rank + 1)\n"
                "            dist.send(outputs.detach(), self.rank + 1)\n"
                "            outputs.backward(received)\n",
            ),
        ),
        says="Each send needs its receive",
    ),
    Wrong(
        "split-model",
        "sends twice",
        (
            (
                "            dist.send(outputs.detach(), self.rank + 1)\n",
                "            dist.send(outputs.detach(), self.rank + 1)\n"
                "            dist.send(outputs.detach(), self.rank + 1)\n",
            ),
            (
                "            inputs = receive(shape, self.rank - 1).requires_grad_()\n",
                "            receive(shape, self.rank - 1)\n"
                "            inputs = receive(shape, self.rank - 1).requires_grad_()\n",
            ),
        ),
        says="once each",
    ),
    Wrong(
        "split-model",
        "broadcasts the activations",
        (
            (
                "            dist.send(outputs.detach(), self.rank + 1)\n",
                "            dist.broadcast(outputs.detach(), self.rank)\n",
            ),
        ),
        says="uses torch.distributed.broadcast",
    ),
    # pipeline-schedule
    Wrong(
        "pipeline-schedule",
        "one forward too many",
        ((WARM_UP, "warm_up = min(stages - stage, micro_batches)"),),
        says="micro-batches alive",
        fast=True,
    ),
    Wrong(
        "pipeline-schedule",
        "one forward too few",
        ((WARM_UP, "warm_up = min(max(0, stages - stage - 2), micro_batches)"),),
        says="the warm-up of each stage long enough",
    ),
    Wrong(
        "pipeline-schedule",
        "the same warm-up on all stages",
        ((WARM_UP, "warm_up = min(stages - 1, micro_batches)"),),
        says="micro-batches alive",
    ),
    Wrong(
        "pipeline-schedule",
        "the warm-up of the other end",
        ((WARM_UP, "warm_up = min(stage, micro_batches)"),),
        says="deadlock",
        fast=True,
    ),
    Wrong(
        "pipeline-schedule",
        "a warm-up longer than the batch",
        ((WARM_UP, "warm_up = stages - stage - 1"),),
        says="there is no micro-batch",
    ),
    Wrong("pipeline-schedule", "forgets the last backwards", ((COOL, ""),), says="the backward of micro-batch"),
    Wrong(
        "pipeline-schedule",
        "forgets the last forward",
        (
            (
                "    for number in range(micro_batches - warm_up):\n",
                "    for number in range(micro_batches - warm_up - 1):\n",
            ),
        ),
        says="is missing",
    ),
    Wrong("pipeline-schedule", "gpipe for both", ((WARM_UP, "warm_up = micro_batches"),), says="micro-batches alive"),
    Wrong(
        "pipeline-schedule",
        "1f1b for both",
        (("        warm_up = micro_batches\n", "        warm_up = min(stages - stage - 1, micro_batches)\n"),),
        says="gpipe runs all forwards first",
    ),
    Wrong(
        "pipeline-schedule",
        "backward before forward",
        ((PAIRS, '        actions += [("B", number), ("F", warm_up + number)]\n'),),
        says="stands before its forward",
    ),
    Wrong(
        "pipeline-schedule",
        "backward of the newest",
        (
            (PAIRS, '        actions += [("F", warm_up + number), ("B", warm_up + number)]\n'),
            (COOL, '    actions += [("B", number) for number in range(warm_up)]\n'),
        ),
        says="not in the order of the micro-batches",
    ),
    Wrong(
        "pipeline-schedule",
        "no pipeline at all",
        ((WARM_UP, "warm_up = 0"),),
        says="the warm-up of each stage long enough",
    ),
    Wrong(
        "pipeline-schedule",
        "an unknown kind is gpipe",
        (
            (
                """        raise ValueError(f"unknown schedule {kind!r}: write 'gpipe' or '1f1b'")\n""",
                "        warm_up = micro_batches\n",
            ),
        ),
        says="must be a ValueError",
    ),
    Wrong(
        "pipeline-schedule",
        "a backward twice",
        ((COOL, COOL + '    actions += [("B", micro_batches - 1)]\n'),),
        says="is there twice",
    ),
    # run-pipeline
    Wrong(
        "run-pipeline",
        "blocking sends",
        (
            (PIPE_SEND, "                dist.send(left.detach(), rank + 1)\n"),
            (PIPE_BACK, "                dist.send(entered.grad, rank - 1)\n"),
        ),
        says="inside send(activation) while the next one is inside send(gradient)",
    ),
    Wrong(
        "run-pipeline",
        "does not divide the loss",
        (
            ("F.mse_loss(left, targets[number]) / micro_batches", "F.mse_loss(left, targets[number])"),
            ("total += left.detach()", "total += left.detach() / micro_batches"),
        ),
        says="divide each loss by the number of micro-batches",
        fast=True,
    ),
    Wrong(
        "run-pipeline",
        "all forwards first",
        (
            (
                "    for kind, number in schedule:\n",
                "    for kind, number in sorted(schedule, key=lambda action: action[0], reverse=True):\n",
            ),
        ),
        says="run the actions in their order",
    ),
    Wrong(
        "run-pipeline",
        "clears the gradients",
        (
            (
                "            entered, left = alive.pop(number)\n",
                "            entered, left = alive.pop(number)\n            stage.zero_grad()\n",
            ),
        ),
        says="those of the last micro-batch alone",
        fast=True,
    ),
    Wrong(
        "run-pipeline",
        "backward of the newest",
        (("alive.pop(number)", "alive.pop(max(alive))"),),
        says="its own micro-batch",
    ),
    Wrong(
        "run-pipeline",
        "returns the last loss",
        (("total += left.detach()", "total = left.detach()"),),
        says="the last micro-batch, divided",
    ),
    Wrong(
        "run-pipeline",
        "returns the sum of the losses",
        (("total += left.detach()", "total += left.detach() * micro_batches"),),
        says="is the sum, not the mean",
    ),
    Wrong(
        "run-pipeline",
        "keeps the graph",
        (
            (
                "left.backward(None if rank == last else receive(shape, rank + 1))",
                "left.backward(None if rank == last else receive(shape, rank + 1), retain_graph=True)\n"
                "            alive[-1 - number] = (entered, left)",
            ),
        ),
        says="free a micro-batch in its backward",
    ),
    Wrong(
        "run-pipeline",
        "received without requires_grad",
        (("receive(shape, rank - 1).requires_grad_()", "receive(shape, rank - 1)"),),
        says="needs requires_grad_() before the stage runs",
    ),
    Wrong(
        "run-pipeline",
        "always the first input",
        (("inputs[number] if rank == 0", "inputs[0] if rank == 0"),),
        says="differ from those of one process",
    ),
    Wrong(
        "run-pipeline",
        "targets in the other order",
        (("targets[number]) /", "targets[-1 - number]) /"),),
        says="differ from those of one process",
    ),
    Wrong(
        "run-pipeline",
        "sends the gradient of the output",
        (
            (
                PIPE_BACK,
                "                sends.append(dist.isend(left.detach() * 1.0 if left.dim() else entered.detach(), "
                "rank - 1))\n",
            ),
        ),
        says="send the gradient of the input",
    ),
    Wrong("run-pipeline", "does not wait for its sends", ((PIPE_WAIT, ""),), says="never waits for the isend"),
    Wrong(
        "run-pipeline",
        "a barrier after each action",
        (
            (
                "    for send in sends:\n        send.wait()\n",
                "    dist.barrier()\n    for send in sends:\n        send.wait()\n",
            ),
        ),
        says="uses torch.distributed.barrier",
    ),
    Wrong(
        "run-pipeline",
        "waits until the next stage is done",
        (
            ("    for kind, number in schedule:\n", "    ready = torch.zeros(1)\n    for kind, number in schedule:\n"),
            (
                "            alive[number] = (entered, left)\n",
                "            alive[number] = (entered, left)\n"
                "            if rank < last:\n"
                "                dist.recv(ready, rank + 1, tag=1)\n"
                "            if rank > 0:\n"
                "                dist.send(ready, rank - 1, tag=1)\n",
            ),
        ),
        says="they work one after the other",
    ),
    Wrong(
        "run-pipeline",
        "returns the loss with its history",
        (("total += left.detach()", "total = total + left"),),
        says="return it detached",
    ),
    # column-row-linear
    Wrong(
        "column-row-linear",
        "no sum in forward",
        ((LEAVE, "        return part.clone()\n"),),
        says="Sum them with all_reduce",
        fast=True,
    ),
    Wrong(
        "column-row-linear",
        "bias on every rank",
        ((LAST_LINE, "return LeaveSplit.apply(part + self.row_bias)"),),
        says="once per rank: add it after the all_reduce",
    ),
    Wrong(
        "column-row-linear",
        "no bias",
        ((LAST_LINE, "return LeaveSplit.apply(part) + 0 * self.row_bias"),),
        says="the row bias is not in the output",
    ),
    Wrong(
        "column-row-linear",
        "no sum in backward",
        ((ENTER, "        return gradient\n"),),
        says="only the part that came through its block",
        fast=True,
    ),
    Wrong(
        "column-row-linear",
        "sums in the backward of forward's all_reduce",
        (
            (
                "        return gradient\n\n\nclass ColumnRowLinear",
                "        total = gradient.clone()\n"
                "        dist.all_reduce(total)\n"
                "        return total\n"
                "\n"
                "\n"
                "class ColumnRowLinear",
            ),
        ),
        says="sums nothing",
    ),
    Wrong(
        "column-row-linear",
        "the mean of the parts",
        (
            (
                LEAVE,
                "        total = part.clone()\n"
                "        dist.all_reduce(total)\n"
                "        return total / dist.get_world_size()\n",
            ),
        ),
        says="the parts of the output were averaged",
    ),
    Wrong(
        "column-row-linear",
        "the mean in backward",
        (
            (
                ENTER,
                "        total = gradient.clone()\n"
                "        dist.all_reduce(total)\n"
                "        return total / dist.get_world_size()\n",
            ),
        ),
        says="inputs.grad is the mean of the parts",
    ),
    Wrong(
        "column-row-linear",
        "slices of the inputs",
        (("first.weight[mine].detach().clone()", "first.weight[:, :width].detach().clone()"),),
        says="takes rows of first.weight",
    ),
    Wrong(
        "column-row-linear",
        "every rank takes the first block",
        (("mine = slice(rank * width, (rank + 1) * width)", "mine = slice(0, width)"),),
        says="of the whole layer, neighbouring features",
    ),
    Wrong(
        "column-row-linear",
        "every n-th feature",
        (("mine = slice(rank * width, (rank + 1) * width)", "mine = slice(rank, None, world)"),),
        says="of the whole layer, neighbouring features",
    ),
    Wrong(
        "column-row-linear",
        "views of the whole layer",
        (("first.weight[mine].detach().clone()", "first.weight[mine].detach()"),),
        says="clone the slice",
    ),
    Wrong(
        "column-row-linear",
        "activation after the sum",
        (
            (
                "hidden = F.gelu(F.linear(EnterSplit.apply(inputs), self.column_weight, self.column_bias))",
                "hidden = F.linear(EnterSplit.apply(inputs), self.column_weight, self.column_bias)",
            ),
            (LAST_LINE, "return F.gelu(LeaveSplit.apply(part) + self.row_bias)"),
        ),
        says="GELU comes between the layers",
    ),
    Wrong(
        "column-row-linear",
        "a second all_reduce",
        (
            (
                LEAVE,
                "        total = part.clone()\n"
                "        dist.all_reduce(total)\n"
                "        total = part.clone()\n"
                "        dist.all_reduce(total)\n"
                "        return total\n",
            ),
        ),
        says="one all_reduce is enough",
    ),
    Wrong(
        "column-row-linear",
        "torch's all_reduce with gradient",
        (
            (
                LAST_LINE,
                "from torch.distributed.nn.functional import all_reduce\n"
                "\n"
                "        return all_reduce(part) + self.row_bias",
            ),
        ),
        says="sums nothing",
    ),
    Wrong(
        "column-row-linear",
        "a plain all_reduce without a function",
        (
            (LAST_LINE, "dist.all_reduce(part.detach())\n        return part + self.row_bias"),
            (
                "        part = F.linear(hidden, self.row_weight)\n",
                "        part = F.linear(hidden, self.row_weight).detach()\n",
            ),
        ),
        says="must let the gradient through",
    ),
    Wrong(
        "column-row-linear",
        "freezes the bias",
        (
            (
                "self.row_bias = nn.Parameter(second.bias.detach().clone())",
                "self.bias = nn.Parameter(second.bias.detach().clone())",
            ),
            (LAST_LINE, "return LeaveSplit.apply(part) + self.bias"),
        ),
        says="there is no parameter row_bias",
    ),
)

RIGHT = (
    Right(
        "split-model",
        "the first ranks get the longer part",
        """
class SplitModel:
    def __init__(self, build, count):
        rank, world = dist.get_rank(), dist.get_world_size()
        parts = torch.arange(count).tensor_split(world)
        self.layers = nn.ModuleList([build(int(number)) for number in parts[rank]])
        self.before = rank - 1 if rank else None
        self.after = rank + 1 if rank + 1 < world else None

    def step(self, inputs, targets, shape):
        value = inputs
        if self.before is not None:
            value = torch.zeros(*shape, requires_grad=True)
            dist.recv(value.data, self.before)
        entered = value
        for layer in self.layers:
            value = layer(value)
        if self.after is None:
            loss = ((value - targets) ** 2).mean()
            loss.backward()
        else:
            dist.send(value.data, self.after)
            gradient = torch.empty(*shape)
            dist.recv(gradient, self.after)
            torch.autograd.backward([value], [gradient])
        if self.before is not None:
            dist.send(entered.grad, self.before)
        return loss.detach() if self.after is None else None
""",
    ),
    Right(
        "split-model",
        "asynchronous messages",
        """
class SplitModel:
    def __init__(self, build, count):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        short, longer = divmod(count, self.world)
        first = self.rank * short + min(self.rank, longer)
        self.layers = nn.Sequential()
        for number in range(first, first + short + (self.rank < longer)):
            self.layers.append(build(number))

    def step(self, inputs, targets, shape):
        if self.rank:
            inputs = torch.empty(*shape)
            dist.irecv(inputs, self.rank - 1).wait()
            inputs.requires_grad = True
        outputs = self.layers(inputs)
        if self.rank + 1 == self.world:
            loss = F.mse_loss(outputs, targets)
            loss.backward()
            result = loss.detach()
        else:
            sending = dist.isend(outputs.detach().contiguous(), self.rank + 1)
            gradient = receive(shape, self.rank + 1)
            sending.wait()
            (outputs * gradient).sum().backward()
            result = None
        if self.rank:
            dist.send(inputs.grad, self.rank - 1)
        return result
""",
    ),
    Right(
        "pipeline-schedule",
        "counts what is alive",
        """
def pipeline_schedule(kind, stage, stages, micro_batches):
    limits = {"gpipe": micro_batches, "1f1b": stages - stage}
    if kind not in limits:
        raise ValueError(kind)
    actions, forward, backward = [], 0, 0
    while backward < micro_batches:
        may_go = forward < micro_batches and forward - backward < limits[kind]
        if may_go and not (kind == "gpipe" and backward):
            actions.append(("F", forward))
            forward += 1
        else:
            actions.append(("B", backward))
            backward += 1
    return actions
""",
    ),
    Right(
        "pipeline-schedule",
        "gpipe backwards from the last",
        """
def pipeline_schedule(kind, stage, stages, micro_batches):
    forwards = [("F", number) for number in range(micro_batches)]
    backwards = [("B", number) for number in range(micro_batches)]
    if kind == "gpipe":
        return forwards + backwards[::-1]
    if kind != "1f1b":
        raise ValueError(f"no such schedule: {kind}")
    ahead = min(stages - stage, micro_batches)
    actions = forwards[:ahead]
    for number, action in enumerate(backwards):
        actions.append(action)
        actions += forwards[ahead + number : ahead + number + 1]
    return actions
""",
    ),
    Right(
        "run-pipeline",
        "first in, first out",
        """
def run_pipeline(stage, schedule, inputs, targets, shape):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    waiting, works, losses = [], [], []
    for kind, number in schedule:
        if kind == "F":
            entered = inputs[number] if rank == 0 else receive(shape, rank - 1)
            if rank:
                entered.requires_grad_()
            outputs = stage(entered)
            if rank == last:
                losses.append(F.mse_loss(outputs, targets[number]).detach())
                outputs = F.mse_loss(outputs, targets[number])
            else:
                works.append(dist.isend(outputs.detach(), rank + 1))
            waiting.append((entered, outputs))
        else:
            entered, outputs = waiting.pop(0)
            if rank == last:
                (outputs * (2 / len(schedule))).backward()
            else:
                outputs.backward(receive(shape, rank + 1))
            if rank:
                works.append(dist.isend(entered.grad, rank - 1))
            del entered, outputs
    while works:
        works.pop().wait()
    return torch.stack(losses).mean() if rank == last else None
""",
    ),
    Right(
        "run-pipeline",
        "sends are waited for when the next one goes",
        """
def run_pipeline(stage, schedule, inputs, targets, shape):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    kept, pending, total = {}, {}, 0.0

    def send(tensor, to):
        if to in pending:
            pending.pop(to).wait()
        pending[to] = dist.isend(tensor, to)

    for kind, number in schedule:
        if kind == "F":
            entered = inputs[number].detach() if rank == 0 else receive(shape, rank - 1)
            entered.requires_grad_(rank > 0)
            kept[number] = entered, stage(entered)
            if rank < last:
                send(kept[number][1].detach(), rank + 1)
            continue
        entered, outputs = kept.pop(number)
        if rank == last:
            loss = F.mse_loss(outputs, targets[number])
            total = total + loss.detach() * 2 / len(schedule)
            (loss * 2 / len(schedule)).backward()
        else:
            outputs.backward(receive(shape, rank + 1))
        if rank > 0:
            send(entered.grad, rank - 1)
    for work in pending.values():
        work.wait()
    return total if rank == last else None
""",
    ),
    Right(
        "column-row-linear",
        "torch.distributed.nn's all_reduce, made right",
        """
class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, at):
        ctx.at = at
        return Sum.add(tensor) if at == "forward" else tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        return (Sum.add(gradient) if ctx.at == "backward" else gradient), None

    @staticmethod
    def add(tensor):
        tensor = tensor.contiguous().clone()
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
        return tensor


class ColumnRowLinear(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()

        def part(tensor, dim):
            return nn.Parameter(tensor.detach().chunk(world, dim)[rank].clone())

        self.column_weight, self.column_bias = part(first.weight, 0), part(first.bias, 0)
        self.row_weight = part(second.weight, 1)
        self.row_bias = nn.Parameter(second.bias.detach().clone())

    def forward(self, inputs):
        hidden = Sum.apply(inputs, "backward") @ self.column_weight.t() + self.column_bias
        return Sum.apply(F.gelu(hidden) @ self.row_weight.t(), "forward") + self.row_bias
""",
    ),
    Right(
        "column-row-linear",
        "a hook for the inputs",
        """
class ColumnRowLinear(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        width = first.out_features // dist.get_world_size()
        start = dist.get_rank() * width
        with torch.no_grad():
            self.column_weight = nn.Parameter(first.weight.narrow(0, start, width).clone())
            self.column_bias = nn.Parameter(first.bias.narrow(0, start, width).clone())
            self.row_weight = nn.Parameter(second.weight.narrow(1, start, width).contiguous())
            self.row_bias = nn.Parameter(second.bias.clone())

    def forward(self, inputs):
        entered = inputs.view_as(inputs)
        if entered.requires_grad:
            entered.register_hook(self.total)
        part = F.linear(F.gelu(F.linear(entered, self.column_weight, self.column_bias)), self.row_weight)
        others = self.total(part.detach()) - part.detach()
        return part + others + self.row_bias

    def total(self, tensor):
        tensor = tensor.clone()
        dist.all_reduce(tensor)
        return tensor
""",
    ),
)
