"""Wrong and other right answers of template_trainer.py."""

from __future__ import annotations

from wrong import Right, Wrong

TENSORS = "for tensor in (*model.parameters(), *model.buffers()):"
SENT = "dist.broadcast(tensor.detach(), src=0)"

FROZEN = """        if not param.requires_grad:
            continue
"""
NO_GRAD = """        if param.grad is None:
            param.grad = torch.zeros_like(param)
"""
SUMMED = "dist.all_reduce(param.grad)"
DIVIDED = "param.grad /= world"

TOTAL = "total = torch.tensor([len(inputs)], dtype=torch.float64)"
SHARE = "share = len(inputs) / total.item()"
BACKWARD = "(loss * share * dist.get_world_size()).backward()"
UPDATE = "        average_gradients(model)\n        optimizer.step()\n"
KEPT = "summed += loss.item() * len(inputs)"
LOSSES = "        dist.all_reduce(summed)\n        losses.append((summed / total).item())"

ROOT_SUM = "            dist.recv(received, src=other)\n            tensor += received\n"
ROOT_BACK = "            dist.send(tensor, dst=other)\n"
LEAF = "        dist.send(tensor, dst=0)\n        dist.recv(tensor, src=0)\n"
ROOT_BEGIN = "        received = torch.empty_like(tensor)\n        for other"

OWN_PART = "parts[rank].copy_(tensor)"
OTHERS = "others = [other for other in range(world) if other != rank]"
ISENDS = "requests = [dist.isend(parts[rank], dst=other) for other in others]"
IRECVS = "requests += [dist.irecv(parts[other], src=other) for other in others]"
WAITS = "    for request in requests:\n        request.wait()\n"
ADDED = "    tensor.zero_()\n    for part in parts:\n        tensor += part\n"

CLIMB = "while distance < world and parent is None:"
IS_CHILD = "if rank % (2 * distance) == distance:"
HAS_CHILD = "elif rank + distance < world:"
UP = """    for child in children:
        dist.recv(received, src=child)
        tensor += received
"""
TO_PARENT = "        dist.send(tensor, dst=parent)\n        dist.recv(tensor, src=parent)\n"
DOWN = "    for child in reversed(children):\n        dist.send(tensor, dst=child)\n"

PREPARED = "            tensor = prepare(size)\n            dist.barrier()\n"
CLOCK = "            start = time.perf_counter()\n            all_reduce(tensor)\n"
SAMPLE = "samples.append(time.perf_counter() - start)"
SLOWEST = "slowest = torch.tensor(samples[1:], dtype=torch.float64)"
AGREED = "dist.all_reduce(slowest, op=dist.ReduceOp.MAX)"
MEDIAN = "statistics.median(slowest.tolist())"
FIT = "slope, intercept = statistics.linear_regression(sizes, seconds)"
RESULT = "return Cost(alpha=intercept, beta=slope)"

WRONG = (
    Wrong(
        "broadcast-model",
        "buffers forgotten",
        ((TENSORS, "for tensor in model.parameters():"),),
        says="model.parameters() does not list it",
        fast=True,
    ),
    Wrong(
        "broadcast-model",
        "state dict",
        ((TENSORS, "for tensor in model.state_dict().values():"),),
        says="not part of the state_dict",
        fast=True,
    ),
    Wrong(
        "broadcast-model",
        "trainable only",
        ((TENSORS, "for tensor in [*[p for p in model.parameters() if p.requires_grad], *model.buffers()]:"),),
        says="frozen parameter",
    ),
    Wrong(
        "broadcast-model",
        "integers left out",
        ((SENT, f"if tensor.is_floating_point():\n            {SENT}"),),
        says="an integer buffer",
    ),
    Wrong(
        "broadcast-model",
        "weights of rank 1",
        ((SENT, SENT.replace("src=0", "src=1")),),
        says="changed to the values of rank 1",
    ),
    Wrong(
        "broadcast-model",
        "mean of the ranks",
        (
            (
                SENT,
                "summed = tensor.detach().double()\n        dist.all_reduce(summed)\n"
                "        tensor.detach().copy_(summed / dist.get_world_size())",
            ),
        ),
        says="the mean over the ranks",
    ),
    Wrong(
        "broadcast-model",
        "copy not stored",
        ((SENT, "dist.broadcast(tensor.detach().clone(), src=0)"),),
        says="all its own",
    ),
    Wrong(
        "broadcast-model",
        "one level",
        ((TENSORS, "for tensor in (*model.first.parameters(), *model.buffers()):"),),
        says="a parameter of an inner module",
    ),
    Wrong(
        "broadcast-model",
        "only the root calls",
        ((SENT, f"if dist.get_rank() == 0:\n            {SENT}"),),
        says="Every rank has to call broadcast",
    ),
    Wrong(
        "broadcast-model",
        "only rank 1 receives",
        ((SENT, f"if dist.get_rank() < 2:\n            {SENT}"),),
        says="Every rank has to call broadcast",
    ),
    Wrong(
        "broadcast-model",
        "new parameters",
        (
            (
                SENT,
                f"{SENT}\n    for module in model.modules():\n"
                "        for name, param in list(module.named_parameters(recurse=False)):\n"
                "            setattr(module, name, nn.Parameter(param.detach().clone(), param.requires_grad))",
            ),
        ),
        says="new objects",
    ),
    Wrong(
        "broadcast-model",
        "requires_grad switched off",
        ((SENT, f"{SENT}\n        tensor.requires_grad_(False)"),),
        says="requires_grad changed",
    ),
    Wrong(
        "broadcast-model",
        "gradient history",
        ((SENT, "other = tensor.detach().clone()\n        dist.broadcast(other, src=0)\n        tensor.copy_(other)"),),
        says="a leaf Variable that requires grad",
    ),
    Wrong(
        "broadcast-model",
        "recorded by autograd",
        ((SENT, "dist.broadcast(tensor, src=0)"),),
        says="while autograd records",
    ),
    Wrong("broadcast-model", "not waited for", ((SENT, SENT[:-1] + ", async_op=True)"),), says="never waits for it"),
    # average-gradients
    Wrong(
        "average-gradients",
        "frozen parameters averaged",
        (
            (
                "        if not param.requires_grad:\n            continue\n        if param.grad is None:\n",
                "        if False:\n",
            ),
        ),
        says="A parameter may have no gradient here",
    ),
    Wrong("average-gradients", "missing average", ((DIVIDED, "pass"),), says="is the sum over the 3 ranks", fast=True),
    Wrong(
        "average-gradients", "result not stored", ((DIVIDED, "param.grad / world"),), says="is the sum over the 3 ranks"
    ),
    Wrong("average-gradients", "two ranks assumed", ((DIVIDED, "param.grad /= 2"),), says="divided by 2"),
    Wrong("average-gradients", "divided twice", ((DIVIDED, "param.grad /= world * world"),), says="a second time"),
    Wrong(
        "average-gradients",
        "missing gradient skipped",
        ((NO_GRAD, "        if param.grad is None:\n            continue\n"),),
        says="must make the same calls as the others",
        fast=True,
    ),
    Wrong(
        "average-gradients",
        "divided by those who have one",
        (
            (
                NO_GRAD,
                "        there = torch.tensor(float(param.grad is not None))\n        dist.all_reduce(there)\n"
                + NO_GRAD,
            ),
            (DIVIDED, "param.grad /= max(1.0, there.item())"),
        ),
        says="the ranks with a gradient",
    ),
    Wrong(
        "average-gradients",
        "zeros not stored",
        (
            (NO_GRAD, "        grad = torch.zeros_like(param) if param.grad is None else param.grad\n"),
            (SUMMED, "dist.all_reduce(grad)"),
            (DIVIDED, "grad /= world"),
        ),
        says="still None on this rank",
    ),
    Wrong("average-gradients", "frozen ones too", ((FROZEN, ""),), says="the frozen"),
    Wrong(
        "average-gradients",
        "only rank 0 gets it",
        ((SUMMED, "dist.reduce(param.grad, dst=0)"),),
        says="gives the sum to one rank only",
    ),
    Wrong(
        "average-gradients",
        "maximum",
        ((SUMMED, SUMMED[:-1] + ", op=dist.ReduceOp.MAX)"),),
        says="is the maximum over the ranks",
    ),
    Wrong(
        "average-gradients",
        "weights averaged",
        ((SUMMED, "dist.all_reduce(param.detach())"), (DIVIDED, "param.detach().div_(world)")),
        says="changed the weight",
    ),
    Wrong("average-gradients", "nothing summed", ((SUMMED, "pass"),), says="nothing was summed"),
    Wrong(
        "average-gradients",
        "copy reduced",
        ((SUMMED, "dist.all_reduce(param.grad.clone())"), (DIVIDED, "pass")),
        says="still has its own gradient",
    ),
    Wrong(
        "average-gradients",
        "float32 buffer",
        (
            (SUMMED, "grad = param.grad.float()\n        dist.all_reduce(grad)"),
            (DIVIDED, "param.grad.copy_(grad / world)"),
        ),
        says="digits only",
    ),
    Wrong("average-gradients", "not waited for", ((SUMMED, SUMMED[:-1] + ", async_op=True)"),), says="never waits"),
    Wrong(
        "average-gradients",
        "cleared before",
        ((SUMMED, "param.grad.zero_()\n        dist.all_reduce(param.grad)"),),
        says="the gradient is zero",
    ),
    # synchronous-loop
    Wrong(
        "synchronous-loop",
        "no broadcast",
        (("    broadcast_model(model)\n    losses", "    losses"),),
        says="began with",
    ),
    Wrong(
        "synchronous-loop",
        "gradients not cleared",
        (("        optimizer.zero_grad()\n", ""),),
        says="clear them",
        fast=True,
    ),
    Wrong(
        "synchronous-loop",
        "mean of the means",
        ((SHARE, "share = 1 / dist.get_world_size()"),),
        says="every rank counts alike",
        fast=True,
    ),
    Wrong("synchronous-loop", "no average", ((UPDATE, "        optimizer.step()\n"),), says="on its own part alone"),
    Wrong(
        "synchronous-loop",
        "unweighted and alone",
        ((BACKWARD, "loss.backward()"), (UPDATE, "        optimizer.step()\n")),
        says="on its own part alone",
    ),
    Wrong(
        "synchronous-loop",
        "update before the average",
        ((BACKWARD, "loss.backward()"), (UPDATE, "        optimizer.step()\n        average_gradients(model)\n")),
        says="before optimizer.step()",
    ),
    Wrong(
        "synchronous-loop",
        "divided twice",
        ((BACKWARD, "(loss * share).backward()"),),
        says="too small by the number of ranks",
    ),
    Wrong("synchronous-loop", "sum of samples", ((SHARE, "share = len(inputs)"),), says="sum over the samples"),
    Wrong("synchronous-loop", "sum of the means", ((SHARE, "share = 1"),), says="summed and not averaged"),
    Wrong(
        "synchronous-loop",
        "empty part computed",
        (("        if len(inputs):\n", "        if True:\n"),),
        says="are nan",
    ),
    Wrong(
        "synchronous-loop",
        "empty part skipped",
        ((TOTAL, "if not len(inputs):\n            continue\n        " + TOTAL),),
        says="must make every collective call",
    ),
    Wrong(
        "synchronous-loop",
        "empty part brings float32",
        (
            (
                "summed = torch.zeros(1, dtype=torch.float64)",
                "summed = torch.zeros(1, dtype=torch.float64 if len(inputs) else torch.float32)",
            ),
        ),
        says="such as a float32 zero",
    ),
    Wrong(
        "synchronous-loop",
        "last batch lost",
        (("for inputs, targets in batches:", "for inputs, targets in list(batches)[:-1]:"),),
        says="one per step",
    ),
    Wrong(
        "synchronous-loop",
        "losses of the own part",
        ((LOSSES, "        losses.append((summed / max(1, len(inputs))).item())"),),
        says="are those of its own part",
    ),
    Wrong(
        "synchronous-loop",
        "losses averaged by ranks",
        ((KEPT, "summed += loss.item()"), (LOSSES, LOSSES.replace("summed / total", "summed / dist.get_world_size()"))),
        says="are means over the ranks",
    ),
    Wrong(
        "synchronous-loop",
        "losses summed",
        ((LOSSES, LOSSES.replace("summed / total", "summed")),),
        says="are sums over samples",
    ),
    Wrong(
        "synchronous-loop",
        "cleared after backward",
        (
            ("        optimizer.zero_grad()\n", ""),
            (UPDATE, "        optimizer.zero_grad()\n" + UPDATE),
        ),
        says="the weights did not move",
    ),
    Wrong(
        "synchronous-loop",
        "loss after the update",
        (
            (
                LOSSES,
                "        summed.zero_()\n        if len(inputs):\n"
                "            summed += loss_function(model(inputs), targets).item() * len(inputs)\n" + LOSSES,
            ),
        ),
        says="are taken after the update",
    ),
    # root-all-reduce
    Wrong(
        "root-all-reduce",
        "overwritten",
        ((ROOT_SUM, "            dist.recv(tensor, src=other)\n"),),
        says="misses rank 0",
        fast=True,
    ),
    Wrong(
        "root-all-reduce",
        "received and not added",
        ((ROOT_SUM, "            dist.recv(received, src=other)\n"),),
        says="still holds its own tensor only",
    ),
    Wrong(
        "root-all-reduce",
        "no way back",
        ((LEAF, "        dist.send(tensor, dst=0)\n"), ("        for other in range(1, world):\n" + ROOT_BACK, "")),
        says="still holds its own tensor only",
    ),
    Wrong(
        "root-all-reduce",
        "receives first",
        ((LEAF, "        dist.recv(tensor, src=0)\n        dist.send(tensor, dst=0)\n"),),
        says="waits in recv from rank",
    ),
    Wrong(
        "root-all-reduce",
        "last rank forgotten",
        ((ROOT_SUM, f"            if other == world - 1:\n                break\n{ROOT_SUM}"),),
        says="no rank receives",
    ),
    Wrong(
        "root-all-reduce",
        "mean",
        (
            (ROOT_BEGIN, ROOT_BEGIN.replace("\n", "\n        tensor /= world\n", 1)),
            (LEAF, "        tensor /= world\n" + LEAF),
        ),
        says="is the mean over the ranks",
    ),
    Wrong(
        "root-all-reduce",
        "own tensor twice",
        ((ROOT_BEGIN, ROOT_BEGIN.replace("\n", "\n        tensor += tensor\n", 1)),),
        says="rank 0's tensor 2 times",
    ),
    Wrong(
        "root-all-reduce",
        "result added",
        ((LEAF, "        own = tensor.clone()\n" + LEAF + "        tensor += own\n"),),
        says="'s tensor 2 times",
    ),
    Wrong(
        "root-all-reduce",
        "sent back too early",
        ((ROOT_SUM + "        for other in range(1, world):\n" + ROOT_BACK, ROOT_SUM + ROOT_BACK),),
        says="misses",
        fast=True,
    ),
    Wrong(
        "root-all-reduce",
        "last buffer sent back",
        ((ROOT_BACK, "            dist.send(received, dst=other)\n"),),
        says="misses rank 0",
    ),
    Wrong(
        "root-all-reduce",
        "uses the collective",
        (
            (
                "    rank, world = dist.get_rank(), dist.get_world_size()\n    if rank == 0:\n",
                "    dist.all_reduce(tensor)\n    return\n    rank, world = dist.get_rank(), 1\n    if rank == 0:\n",
            ),
        ),
        says="uses torch.distributed.all_reduce",
    ),
    Wrong(
        "root-all-reduce",
        "chain to the root",
        (
            (
                "        for other in range(1, world):\n" + ROOT_SUM,
                "        dist.recv(received, src=1)\n        tensor += received\n",
            ),
            (
                LEAF,
                "        if rank + 1 < world:\n            received = torch.empty_like(tensor)\n"
                "            dist.recv(received, src=rank + 1)\n            tensor += received\n"
                "        dist.send(tensor, dst=rank - 1)\n        dist.recv(tensor, src=0)\n",
            ),
        ),
        says="here every message goes to rank 0",
    ),
    Wrong(
        "root-all-reduce",
        "new tensor",
        ((ROOT_BEGIN, ROOT_BEGIN.replace("\n", "\n        tensor = tensor.clone()\n", 1)),),
        says="Rank 0 of 4 still holds its own",
    ),
    Wrong(
        "root-all-reduce",
        "row by row",
        (
            (
                ROOT_SUM,
                "            for row in tensor.flatten().split(9):\n                piece = torch.empty_like(row)\n"
                "                dist.recv(piece, src=other)\n                row += piece\n",
            ),
            (
                ROOT_BACK,
                "            for row in tensor.flatten().split(9):\n                dist.send(row, dst=other)\n",
            ),
            (
                LEAF,
                "        for row in tensor.flatten().split(9):\n            dist.send(row, dst=0)\n"
                "        for row in tensor.flatten().split(9):\n            dist.recv(row, src=0)\n",
            ),
        ),
        says="messages, 3 are enough",
    ),
    # exchange-all-reduce
    Wrong(
        "exchange-all-reduce",
        "all send first",
        ((ISENDS, "for other in others:\n        dist.send(parts[rank], dst=other)\n    requests = []"),),
        says="Every rank waits in send",
        fast=True,
    ),
    Wrong("exchange-all-reduce", "no wait", ((WAITS, ""),), says="never waits for it"),
    Wrong(
        "exchange-all-reduce",
        "sends not waited for",
        ((WAITS, WAITS.replace("in requests", "in requests[len(others) :]")),),
        says="never waits for it",
    ),
    Wrong(
        "exchange-all-reduce",
        "added while it is sent",
        (
            (ISENDS, "requests = [dist.isend(tensor, dst=other) for other in others]"),
            (
                IRECVS,
                "for other in others:\n        dist.recv(parts[other], src=other)\n        tensor += parts[other]",
            ),
            (ADDED, ""),
        ),
        says="times",
    ),
    Wrong(
        "exchange-all-reduce",
        "one buffer",
        (
            (IRECVS, "requests += [dist.irecv(parts[(rank + 1) % world], src=other) for other in others]"),
            (
                "parts = [torch.empty_like(tensor) for _ in range(world)]",
                "parts = [torch.zeros_like(tensor) for _ in range(world)]",
            ),
        ),
        says="misses",
    ),
    Wrong(
        "exchange-all-reduce",
        "own order of addition",
        ((ADDED, "    for other in others:\n        tensor += parts[other]\n"),),
        says="differ in the last bits",
        fast=True,
    ),
    Wrong(
        "exchange-all-reduce", "own part twice", ((ADDED, ADDED.replace("    tensor.zero_()\n", "")),), says="2 times"
    ),
    Wrong(
        "exchange-all-reduce",
        "own part lost",
        ((ADDED, ADDED.replace("for part in parts", "for part in [parts[other] for other in others]")),),
        says="misses rank",
    ),
    Wrong(
        "exchange-all-reduce",
        "mean",
        ((ADDED, ADDED + "    tensor /= world\n"),),
        says="is the mean over the ranks",
    ),
    Wrong(
        "exchange-all-reduce",
        "neighbour only",
        ((OTHERS, "others = [(rank + 1) % world]"),),
        says="a message has no partner",
    ),
    Wrong(
        "exchange-all-reduce",
        "through the root",
        ((OTHERS, "return root_all_reduce(tensor)\n    " + OTHERS),),
        says="messages",
    ),
    Wrong(
        "exchange-all-reduce",
        "every message twice",
        (
            (
                ISENDS,
                ISENDS + "\n    requests += [dist.isend(parts[rank], dst=other) for other in others]\n"
                "    requests += [dist.irecv(torch.empty_like(tensor), src=other) for other in others]",
            ),
        ),
        says="are enough",
    ),
    Wrong(
        "exchange-all-reduce",
        "collects the tensors by a collective",
        (
            (ISENDS, "dist.all_gather(parts, tensor)\n    requests = []"),
            (IRECVS, ""),
        ),
        says="uses torch.distributed.all_gather",
    ),
    # tree-all-reduce
    Wrong(
        "tree-all-reduce",
        "through the root",
        ((CLIMB, "return root_all_reduce(tensor)\n    " + CLIMB),),
        says="messages, 2 are enough",
        fast=True,
    ),
    Wrong(
        "tree-all-reduce",
        "powers of two only",
        ((HAS_CHILD, "else:"),),
        says="5 ranks: ",
    ),
    Wrong(
        "tree-all-reduce",
        "no way down",
        ((TO_PARENT, "        dist.send(tensor, dst=parent)\n"), (DOWN, "")),
        says="still holds its own tensor only",
    ),
    Wrong(
        "tree-all-reduce",
        "down in the order of climbing",
        ((DOWN, "    for child in children[:1]:\n        dist.send(tensor, dst=child)\n"),),
        says="a message has no partner",
    ),
    Wrong(
        "tree-all-reduce",
        "overwritten",
        ((UP, "    for child in children:\n        dist.recv(tensor, src=child)\n"),),
        says="misses",
    ),
    Wrong(
        "tree-all-reduce",
        "received and not added",
        ((UP, "    for child in children:\n        dist.recv(received, src=child)\n"),),
        says="still holds its own tensor only",
    ),
    Wrong(
        "tree-all-reduce",
        "keeps climbing after it has sent",
        ((CLIMB, "while distance < world:"),),
        says="no partner",
    ),
    Wrong(
        "tree-all-reduce",
        "distance grows by one",
        (("distance *= 2", "distance += 1"),),
        says="a message has no partner",
    ),
    Wrong(
        "tree-all-reduce", "one level", ((CLIMB, "while distance < 2 and parent is None:"),), says="misses", fast=True
    ),
    Wrong(
        "tree-all-reduce",
        "received sum added",
        (
            (
                TO_PARENT,
                "        dist.send(tensor, dst=parent)\n        dist.recv(received, src=parent)\n"
                "        tensor += received\n",
            ),
        ),
        says="2 times",
    ),
    Wrong("tree-all-reduce", "mean", ((DOWN, DOWN + "    tensor /= world\n"),), says="is the mean over the ranks"),
    Wrong(
        "tree-all-reduce",
        "parent receives before the children",
        ((UP, ""), (DOWN, DOWN + UP)),
        says="Every rank waits in send",
    ),
    Wrong(
        "tree-all-reduce",
        "sum sent to the root's place only",
        (
            (
                TO_PARENT,
                TO_PARENT.replace(
                    "        dist.recv(tensor, src=parent)\n", "        dist.recv(received, src=parent)\n"
                ),
            ),
        ),
        says="still holds its own tensor only",
    ),
    # measure-all-reduce
    Wrong(
        "measure-all-reduce",
        "no barrier",
        ((PREPARED, "            tensor = prepare(size)\n"),),
        says="put a barrier before the clock starts",
        fast=True,
    ),
    Wrong(
        "measure-all-reduce",
        "barrier inside the clock",
        (
            (PREPARED, "            tensor = prepare(size)\n"),
            (CLOCK, CLOCK.replace("            all_reduce", "            dist.barrier()\n            all_reduce")),
        ),
        says="put a barrier before the clock starts",
    ),
    Wrong(
        "measure-all-reduce",
        "preparation measured",
        (
            (
                PREPARED + CLOCK,
                "            dist.barrier()\n"
                + CLOCK.replace("            all_reduce", "            tensor = prepare(size)\n            all_reduce"),
            ),
        ),
        says="put a barrier before the clock starts",
    ),
    Wrong(
        "measure-all-reduce",
        "first call counts",
        ((SLOWEST, SLOWEST.replace("samples[1:]", "samples")), (MEDIAN, "statistics.mean(slowest.tolist())")),
        says="the slow first call of each size is in it",
    ),
    Wrong(
        "measure-all-reduce",
        "mean",
        ((MEDIAN, "statistics.mean(slowest.tolist())"),),
        says="one slow call of five moves the mean",
        fast=True,
    ),
    Wrong("measure-all-reduce", "maximum", ((MEDIAN, "max(slowest.tolist())"),), says="the slowest call counts"),
    Wrong(
        "measure-all-reduce",
        "first call only",
        (
            (MEDIAN, "samples[0]"),
            (AGREED, "samples = slowest = torch.tensor(samples[:1], dtype=torch.float64)\n        " + AGREED),
        ),
        says="only the slow first call",
    ),
    Wrong("measure-all-reduce", "own clock", ((AGREED, "pass"),), says="each uses its own clock"),
    Wrong("measure-all-reduce", "clock of rank 0", ((AGREED, "dist.broadcast(slowest, src=0)"),), says="rank 0 alone"),
    Wrong(
        "measure-all-reduce",
        "mean over the ranks",
        ((AGREED, "dist.all_reduce(slowest)\n        slowest /= dist.get_world_size()"),),
        says="the mean over the ranks",
    ),
    Wrong("measure-all-reduce", "sum over the ranks", ((AGREED, "dist.all_reduce(slowest)"),), says="are summed"),
    Wrong(
        "measure-all-reduce",
        "elements",
        ((FIT, FIT.replace("(sizes,", "([size / 4 for size in sizes],")),),
        says="per element",
    ),
    Wrong("measure-all-reduce", "through zero", ((FIT, FIT[:-1] + ", proportional=True)"),), says="alpha is 0"),
    Wrong(
        "measure-all-reduce", "exchanged", ((RESULT, "return Cost(alpha=slope, beta=intercept)"),), says="are exchanged"
    ),
    Wrong(
        "measure-all-reduce",
        "bandwidth",
        ((RESULT, "return Cost(alpha=intercept, beta=1 / slope)"),),
        says="bytes per second",
    ),
    Wrong(
        "measure-all-reduce",
        "processor time",
        (
            (CLOCK, CLOCK.replace("perf_counter", "process_time")),
            (SAMPLE, SAMPLE.replace("perf_counter", "process_time")),
        ),
        says="process_time counts computing",
    ),
    Wrong(
        "measure-all-reduce",
        "elements prepared",
        ((PREPARED, PREPARED.replace("prepare(size)", "prepare(size // 4)")),),
        says="Use every size",
    ),
    Wrong(
        "measure-all-reduce",
        "sum of the repeats",
        ((MEDIAN, "sum(slowest.tolist())"),),
        says="seconds of all repeats together",
    ),
    Wrong(
        "measure-all-reduce",
        "milliseconds",
        ((RESULT, "return Cost(alpha=1000 * intercept, beta=1000 * slope)"),),
        says="the unit is milliseconds",
    ),
)

RIGHT = (
    Right(
        "broadcast-model",
        "named tensors without gradients",
        """
@torch.no_grad()
def broadcast_model(model):
    for module in model.modules():
        for _, tensor in module.named_parameters(recurse=False):
            dist.broadcast(tensor.data, 0)
        for _, tensor in module.named_buffers(recurse=False):
            dist.broadcast(tensor, 0)
""",
    ),
    Right(
        "broadcast-model",
        "point to point",
        """
@torch.no_grad()
def broadcast_model(model):
    for tensor in [*model.parameters(), *model.buffers()]:
        received = tensor.detach().clone()
        if dist.get_rank() == 0:
            for other in range(1, dist.get_world_size()):
                dist.send(received, other)
        else:
            dist.recv(received, 0)
            tensor.copy_(received)
""",
    ),
    Right(
        "average-gradients",
        "one flat buffer",
        """
def average_gradients(model):
    params = [param for param in model.parameters() if param.requires_grad]
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    flat = torch.cat([param.grad.flatten() for param in params])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for param, piece in zip(params, flat.split([param.numel() for param in params])):
        param.grad = piece.view_as(param).clone()
""",
    ),
    Right(
        "average-gradients",
        "started together, divided first",
        """
def average_gradients(model):
    works = []
    for param in filter(lambda each: each.requires_grad, model.parameters()):
        grad = torch.zeros_like(param) if param.grad is None else param.grad / dist.get_world_size()
        param.grad = grad
        works.append(dist.all_reduce(grad, async_op=True))
    for work in works:
        work.wait()
""",
    ),
    Right(
        "synchronous-loop",
        "sums of losses",
        """
def train(model, optimizer, loss_function, batches):
    broadcast_model(model)
    losses = []
    for inputs, targets in batches:
        numbers = torch.zeros(2, dtype=torch.float64)
        optimizer.zero_grad(set_to_none=False)
        if inputs.shape[0] > 0:
            loss = loss_function(model(inputs), targets) * inputs.shape[0]
            loss.backward()
            numbers = torch.tensor([loss.item(), inputs.shape[0]], dtype=torch.float64)
        dist.all_reduce(numbers)
        for param in model.parameters():
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            dist.all_reduce(param.grad)
            param.grad /= numbers[1]
        optimizer.step()
        losses.append(float(numbers[0] / numbers[1]))
    return losses
""",
    ),
    Right(
        "synchronous-loop",
        "gradients scaled after backward",
        """
def train(model, optimizer, loss_function, batches):
    broadcast_model(model)
    world, losses = dist.get_world_size(), []
    for inputs, targets in batches:
        counts = [torch.zeros(1) for _ in range(world)]
        dist.all_gather(counts, torch.tensor([float(len(inputs))]))
        share = len(inputs) / sum(count.item() for count in counts)
        model.zero_grad()
        mean = torch.zeros((), dtype=torch.float64)
        if share:
            loss = loss_function(model(inputs), targets)
            loss.backward()
            mean = loss.detach().double() * share
            for param in model.parameters():
                param.grad *= share * world
        average_gradients(model)
        optimizer.step()
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses
""",
    ),
    Right(
        "root-all-reduce",
        "requests",
        """
def root_all_reduce(tensor):
    world = dist.get_world_size()
    if dist.get_rank():
        dist.isend(tensor, 0).wait()
        dist.irecv(tensor, 0).wait()
        return
    parts = [torch.empty_like(tensor) for _ in range(world - 1)]
    for work in [dist.irecv(part, other) for other, part in enumerate(parts, 1)]:
        work.wait()
    for part in parts:
        tensor.add_(part)
    for work in [dist.isend(tensor, other) for other in range(1, world)]:
        work.wait()
""",
    ),
    Right(
        "root-all-reduce",
        "any order of arrival",
        """
def root_all_reduce(tensor):
    others = range(1, dist.get_world_size())
    if dist.get_rank() == 0:
        buffer = torch.zeros_like(tensor)
        for other in reversed(others):
            dist.recv(buffer, src=other)
            tensor.copy_(tensor + buffer)
        for other in reversed(others):
            dist.send(tensor, dst=other)
    else:
        dist.send(tensor.clone(), dst=0)
        dist.recv(tensor, src=0)
""",
    ),
    Right(
        "exchange-all-reduce",
        "pairs by parity of the order",
        """
def exchange_all_reduce(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    parts = {rank: tensor.clone()}
    for other in range(world):
        if other == rank:
            continue
        parts[other] = torch.empty_like(tensor)
        if rank < other:
            dist.send(parts[rank], other)
            dist.recv(parts[other], other)
        else:
            dist.recv(parts[other], other)
            dist.send(parts[rank], other)
    tensor.copy_(torch.stack([parts[index] for index in range(world)]).sum(0))
""",
    ),
    Right(
        "exchange-all-reduce",
        "receives first",
        """
def exchange_all_reduce(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    own = tensor.clone()
    parts = [own if other == rank else torch.empty_like(own) for other in range(world)]
    works = []
    for shift in range(1, world):
        source, target = (rank - shift) % world, (rank + shift) % world
        works.append(dist.irecv(parts[source], src=source))
        works.append(dist.isend(own, dst=target))
    [work.wait() for work in works]
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    tensor.copy_(total)
""",
    ),
    Right(
        "tree-all-reduce",
        "heap tree up and binomial",
        """
def tree_all_reduce(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    step = 1
    received = torch.empty_like(tensor)
    while step < world:
        if rank % (2 * step):
            dist.send(tensor, rank - step)
            break
        if rank + step < world:
            dist.recv(received, rank + step)
            tensor += received
        step *= 2
    top = 1
    while top * 2 < world:
        top *= 2
    while top:
        if rank % (2 * top) == 0 and rank + top < world:
            dist.send(tensor, rank + top)
        elif rank % (2 * top) == top:
            dist.recv(tensor, rank - top)
        top //= 2
""",
    ),
    Right(
        "tree-all-reduce",
        "bits and requests",
        """
def tree_all_reduce(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    lowest = rank & -rank if rank else 1 << (world - 1).bit_length()
    children = [rank + (1 << bit) for bit in range(lowest.bit_length() - 1) if rank + (1 << bit) < world]
    parts = [torch.empty_like(tensor) for _ in children]
    for work in [dist.irecv(part, child) for part, child in zip(parts, children)]:
        work.wait()
    for part in parts:
        tensor += part
    if rank:
        dist.send(tensor, rank - lowest)
        dist.recv(tensor, rank - lowest)
    for work in [dist.isend(tensor, child) for child in children]:
        work.wait()
""",
    ),
    Right(
        "measure-all-reduce",
        "minimum and normal equations",
        """
def measure_all_reduce(all_reduce, prepare, sizes, *, repeats=5):
    seconds = []
    for size in sizes:
        all_reduce(prepare(size))
        best = float("inf")
        for _ in range(repeats):
            tensor = prepare(size)
            dist.barrier()
            start = time.monotonic()
            all_reduce(tensor)
            took = torch.tensor([time.monotonic() - start], dtype=torch.float64)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            best = min(best, took.item())
        seconds.append(best)
    mean_size, mean_seconds = sum(sizes) / len(sizes), sum(seconds) / len(seconds)
    beta = sum((n - mean_size) * (t - mean_seconds) for n, t in zip(sizes, seconds)) / sum(
        (n - mean_size) ** 2 for n in sizes
    )
    return Cost(mean_seconds - beta * mean_size, beta)
""",
    ),
    Right(
        "measure-all-reduce",
        "least squares and gathered times",
        """
def measure_all_reduce(all_reduce, prepare, sizes, *, repeats=5):
    table = torch.zeros(len(sizes), repeats, dtype=torch.float64)
    for row, size in enumerate(sizes):
        for call in range(-1, repeats):
            tensor = prepare(size)
            dist.barrier()
            start = time.perf_counter()
            all_reduce(tensor)
            if call >= 0:
                table[row, call] = time.perf_counter() - start
    tables = [torch.empty_like(table) for _ in range(dist.get_world_size())]
    dist.all_gather(tables, table)
    seconds = torch.stack(tables).amax(0).median(dim=1).values
    system = torch.tensor([[1.0, float(size)] for size in sizes], dtype=torch.float64)
    alpha, beta = torch.linalg.lstsq(system, seconds[:, None]).solution.flatten().tolist()
    return Cost(alpha, beta)
""",
    ),
)
