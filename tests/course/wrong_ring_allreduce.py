"""Wrong and other right answers for template_ring_allreduce.py."""

from __future__ import annotations

from wrong import Right, Wrong

SEND_FIRST = (
    ("sending = dist.isend(outgoing, target)", "dist.send(outgoing, target)"),
    ("    sending.wait()\n", ""),
)
SEND_LINE = "        outgoing = chunks[(position - step) % size]\n"
ADD_LINE = "        chunk = chunks[(position - step - 1) % size]\n"
GATHER_SEND = "outgoing = chunks[(position + 1 - step) % size]"
GATHER_GET = "incoming = chunks[(position - step) % size]"
SCATTER_STEPS = "    for step in range(size - 1):\n        outgoing = chunks[(position - step) % size]"
GATHER_STEPS = "    for step in range(size - 1):\n        outgoing = chunks[(position + 1 - step) % size]"
BACKWARDS = (
    "order[(position + 1) % size], order[(position - 1) % size]",
    "order[position - 1], order[(position + 1) % size]",
)
LOST_TAIL = (
    "return list(flat.tensor_split(count))",
    "return list(flat.split(len(flat) // count))[:count] if len(flat) >= count else [flat, *[flat[:0]] * (count - 1)]",
)
WHOLE = (
    "    flat = tensor.contiguous().view(-1)\n"
    "    ring_reduce_scatter(flat, ring)\n"
    "    ring_all_gather(flat, ring)\n"
    "    tensor.copy_(flat.view(tensor.shape))\n"
)
ALL_RANKS = "order = list(range(dist.get_world_size()))"
KEEPS_COUNTS = (
    "            self.buckets.unflatten(index, flat / dist.get_world_size())\n"
    "        missing = self.missing\n"
    "        self.reset()\n"
    "        self.missing = missing"
)
THROUGH_STORE = (
    "    store = dist.distributed_c10d._get_default_store()\n"
    "    store.set(str(rank), str(tensor.tolist()))\n"
    "    tensor.copy_(sum(torch.tensor(eval(store.get(str(other)))) for other in range(len(hosts))))\n"
    "    return\n"
)

WRONG = (
    # ring-reduce-scatter
    Wrong(
        "ring-reduce-scatter",
        "every rank sends first",
        SEND_FIRST,
        says="if every rank of a ring sends first",
        fast=True,
    ),
    Wrong(
        "ring-reduce-scatter",
        "begins with the next chunk",
        (
            ("(position - step) % size]\n        chunk", "(position + 1 - step) % size]\n        chunk"),
            ("(position - step - 1) % size", "(position - step) % size]; _ = chunks[(0)"),
        ),
        says="look at which chunk you send first",
        fast=True,
    ),
    Wrong(
        "ring-reduce-scatter",
        "receives over its own part",
        (
            ("        incoming = torch.empty_like(chunk)\n", "        incoming = chunk\n"),
            ("        chunk += incoming\n", ""),
        ),
        says="Its own part is lost",
    ),
    Wrong(
        "ring-reduce-scatter",
        "adds to a copy",
        (("        chunk += incoming\n", "        chunk = chunk + incoming\n"),),
        says="Add what you receive to a view",
    ),
    Wrong(
        "ring-reduce-scatter",
        "one step too few",
        ((SCATTER_STEPS, SCATTER_STEPS.replace("size - 1", "size - 2")),),
        says="still its own part alone",
    ),
    Wrong(
        "ring-reduce-scatter",
        "one step too many",
        ((SCATTER_STEPS, SCATTER_STEPS.replace("size - 1", "size")),),
        says="messages; ",
    ),
    Wrong(
        "ring-reduce-scatter",
        "sends the same chunk in each step",
        ((SEND_LINE, "        outgoing = chunks[position]\n"),),
        says="not a sum of one part of each rank",
    ),
    Wrong(
        "ring-reduce-scatter",
        "divides by the number of ranks",
        (("        chunk += incoming\n", "        chunk += incoming\n    chunks[(position + 1) % size].div_(size)\n"),),
        says="is the mean",
    ),
    Wrong(
        "ring-reduce-scatter",
        "sends the whole tensor each time",
        (
            (
                "    chunks = split_chunks(flat, size)\n"
                "    for step in range(size - 1):\n"
                "        outgoing = chunks[(position - step) % size]\n",
                "    chunks, own, outgoing = [flat] * size, flat.clone(), flat.clone()\n"
                "    for step in range(size - 1):\n",
            ),
            ("        chunk += incoming\n", "        chunk += incoming\n        outgoing = incoming.clone()\n"),
        ),
        says="bytes in all",
    ),
    Wrong("ring-reduce-scatter", "sends to the previous rank", (BACKWARDS,), says="sends to rank"),
    Wrong(
        "ring-reduce-scatter",
        "adds what it received twice",
        (("        chunk += incoming\n", "        chunk += 2 * incoming\n"),),
        says="2 x rank",
    ),
    Wrong(
        "ring-reduce-scatter",
        "calls torch's own",
        (
            (
                "    position, size, target, source = neighbours(ring)\n"
                "    chunks = split_chunks(flat, size)\n"
                "    for step in range(size - 1):\n"
                "        outgoing = chunks[(position - step)",
                "    position, size, target, source = neighbours(ring)\n"
                "    chunks = split_chunks(flat, size)\n"
                "    dist.all_reduce(flat)\n"
                "    for step in range(0):\n"
                "        outgoing = chunks[(position - step)",
            ),
        ),
        says="uses torch.distributed.all_reduce",
    ),
    # ring-all-gather
    Wrong("ring-all-gather", "every rank sends first", SEND_FIRST, says="if every rank of a ring sends first"),
    Wrong(
        "ring-all-gather",
        "begins with the own position",
        (
            (GATHER_SEND, "outgoing = chunks[(position - step) % size]"),
            (GATHER_GET, "incoming = chunks[(position - step - 1) % size]"),
        ),
        says="In step s a rank sends chunk",
        fast=True,
    ),
    Wrong(
        "ring-all-gather",
        "adds what it receives",
        (
            (GATHER_GET, "chunk = chunks[(position - step) % size]\n        incoming = torch.empty_like(chunk)"),
            (
                "        swap(outgoing, target, incoming, source)\n\n\ndef ring_all_reduce",
                "        swap(outgoing, target, incoming, source)\n        chunk += incoming\n\n\ndef ring_all_reduce",
            ),
        ),
        says="nothing is added",
    ),
    Wrong(
        "ring-all-gather",
        "one step too few",
        ((GATHER_STEPS, GATHER_STEPS.replace("size - 1", "size - 2")),),
        says="was never received",
        fast=True,
    ),
    Wrong(
        "ring-all-gather",
        "one step too many",
        ((GATHER_STEPS, GATHER_STEPS.replace("size - 1", "size")),),
        says="are enough",
    ),
    Wrong(
        "ring-all-gather",
        "receives into a copy",
        ((GATHER_GET, "incoming = chunks[(position - step) % size].clone()"),),
        says="In step s a rank sends chunk",
    ),
    Wrong(
        "ring-all-gather",
        "passes on the first chunk in each step",
        (
            (GATHER_SEND, "outgoing = chunks[(position + 1) % size]"),
            (
                "        swap(outgoing, target, incoming, source)\n\n\ndef ring_all_reduce",
                "        taken = torch.zeros(flat.numel(), dtype=flat.dtype)[: len(chunks[position])]\n"
                "        swap(outgoing, target, taken, source)\n"
                "        incoming.copy_(taken[: len(incoming)] if len(taken) >= len(incoming) else incoming)\n"
                "\n"
                "\n"
                "def ring_all_reduce",
            ),
        ),
        says="In step s a rank sends chunk",
    ),
    Wrong("ring-all-gather", "sends to the previous rank", (BACKWARDS,), says="sends to rank"),
    Wrong(
        "ring-all-gather",
        "sends everything to everyone",
        (
            (
                GATHER_STEPS,
                "    for other in (rank for rank in range(size) if rank != position):\n"
                "        mine = dist.isend(chunks[(position + 1) % size], other)\n"
                "        dist.recv(chunks[(other + 1) % size], other)\n"
                "        mine.wait()\n"
                "    for step in range(0):\n"
                "        outgoing = chunks[0]",
            ),
        ),
        says="sends to rank",
    ),
    Wrong(
        "ring-all-gather",
        "sends the whole tensor",
        (
            (GATHER_SEND, "outgoing = flat.clone()"),
            (GATHER_GET, "incoming = torch.empty_like(flat)"),
            (
                "        swap(outgoing, target, incoming, source)\n\n\ndef ring_all_reduce",
                "        swap(outgoing, target, incoming, source)\n"
                "        old = split_chunks(incoming, size)[(position - step) % size]\n"
                "        chunks[(position - step) % size].copy_(old)\n"
                "\n"
                "\n"
                "def ring_all_reduce",
            ),
        ),
        says="bytes in all",
    ),
    Wrong(
        "ring-all-gather",
        "puts chunks in the order of arrival",
        (
            (GATHER_GET, "arrived = torch.empty_like(chunks[(position - step) % size])"),
            (GATHER_SEND, "outgoing = chunks[(position + 1) % size] if step == 0 else arrived"),
            (
                "        swap(outgoing, target, incoming, source)\n\n\ndef ring_all_reduce",
                "        swap(outgoing, target, arrived, source)\n"
                "        place = chunks[(position + 2 + step) % size]\n"
                "        place.copy_(arrived[: len(place)] if len(arrived) >= len(place) else place)\n"
                "\n"
                "\n"
                "def ring_all_reduce",
            ),
        ),
        says="holds",
    ),
    Wrong(
        "ring-all-gather",
        "calls torch's own",
        ((GATHER_STEPS, "    dist.broadcast(chunks[1], 0)\n" + GATHER_STEPS),),
        says="uses torch.distributed.broadcast",
    ),
    # ring-all-reduce
    Wrong("ring-all-reduce", "every rank sends first", SEND_FIRST, says="if every rank of a ring sends first"),
    Wrong(
        "ring-all-reduce",
        "takes the mean",
        (
            (
                "    tensor.copy_(flat.view(tensor.shape))",
                "    tensor.copy_(flat.view(tensor.shape) / neighbours(ring)[1])",
            ),
        ),
        says="the result is the mean",
    ),
    Wrong("ring-all-reduce", "loses the last elements", (LOST_TAIL,), says="elements did not change", fast=True),
    Wrong(
        "ring-all-reduce",
        "returns a new tensor",
        (
            ('-> None:\n    """Replace a tensor of any shape', '-> Tensor:\n    """Replace a tensor of any shape'),
            ("    flat = tensor.contiguous().view(-1)", "    flat = tensor.contiguous().view(-1).clone()"),
            ("    tensor.copy_(flat.view(tensor.shape))", "    return flat.view(tensor.shape)"),
        ),
        says="the result was returned, but the tensor did not change",
    ),
    Wrong(
        "ring-all-reduce",
        "forgets tensors that are not contiguous",
        (
            ("    flat = tensor.contiguous().view(-1)", "    flat = tensor.reshape(-1)"),
            ("    tensor.copy_(flat.view(tensor.shape))", "    return None"),
        ),
        says="not contiguous: on rank 0 the tensor did not change",
    ),
    Wrong(
        "ring-all-reduce",
        "computes in float32",
        (("    flat = tensor.contiguous().view(-1)", "    flat = tensor.contiguous().view(-1).float()"),),
        says="the sum is rounded",
    ),
    Wrong(
        "ring-all-reduce",
        "sends bfloat16 as float32",
        (
            (
                "    flat = tensor.contiguous().view(-1)",
                "    flat = tensor.contiguous().view(-1)\n"
                "    flat = flat.float() if flat.dtype == torch.bfloat16 else flat",
            ),
        ),
        says="travelled as another type",
    ),
    Wrong(
        "ring-all-reduce",
        "ignores the ring",
        (
            (
                "    ring_reduce_scatter(flat, ring)\n    ring_all_gather(flat, ring)",
                "    ring_reduce_scatter(flat)\n    ring_all_gather(flat)",
            ),
        ),
        says="Hand `ring` on to both halves",
    ),
    Wrong(
        "ring-all-reduce",
        "forgets the all-gather",
        (("    ring_all_gather(flat, ring)\n", ""),),
        says="the all-gather that follows is missing",
        fast=True,
    ),
    Wrong(
        "ring-all-reduce",
        "sums twice",
        (
            (
                "    tensor.copy_(flat.view(tensor.shape))",
                "    if neighbours(ring)[1] > 1:\n"
                "        ring_reduce_scatter(flat, ring)\n"
                "        ring_all_gather(flat, ring)\n"
                "    tensor.copy_(flat.view(tensor.shape))",
            ),
        ),
        says="3 x rank 0",
    ),
    Wrong(
        "ring-all-reduce",
        "passes whole tensors round",
        (
            (
                WHOLE,
                "    _, size, target, source = neighbours(ring)\n"
                "    total, moving = tensor.clone(), tensor.contiguous()\n"
                "    for _ in range(size - 1):\n"
                "        incoming = torch.empty_like(moving)\n"
                "        swap(moving, target, incoming, source)\n"
                "        total += incoming\n"
                "        moving = incoming\n"
                "    tensor.copy_(total)\n",
            ),
        ),
        says="send one chunk per step, not the whole tensor",
    ),
    Wrong(
        "ring-all-reduce",
        "sends to every rank",
        (
            (
                WHOLE,
                "    rank, world = dist.get_rank(), dist.get_world_size()\n"
                "    total, own = tensor.clone(), tensor.contiguous().clone()\n"
                "    for other in (each for each in (ring or range(world)) if each != rank):\n"
                "        incoming = torch.empty_like(own)\n"
                "        swap(own, other, incoming, other)\n"
                "        total += incoming\n"
                "    tensor.copy_(total)\n",
            ),
        ),
        says="sends to rank",
    ),
    Wrong(
        "ring-all-reduce",
        "calls torch's own",
        (
            (
                "    ring_all_gather(flat, ring)\n",
                "    dist.all_gather(split_chunks(flat, neighbours(ring)[1]), flat)\n",
            ),
        ),
        says="uses torch.distributed.all_gather",
    ),
    # buckets
    Wrong(
        "buckets",
        "order of registration",
        (
            (
                "reversed([each for each in parameters if each.requires_grad])",
                "[each for each in parameters if each.requires_grad]",
            ),
        ),
        says="in order of registration",
        fast=True,
    ),
    Wrong(
        "buckets",
        "counts elements instead of bytes",
        (("parameter.numel() * parameter.element_size()", "parameter.numel()"),),
        says="the limit is in bytes",
        fast=True,
    ),
    Wrong(
        "buckets",
        "starts a group after the limit is passed",
        (("used + size > limit", "used > limit"),),
        says="the limit is 400",
    ),
    Wrong("buckets", "one parameter per group", (("used + size > limit", "used >= 0"),), says="as long as they fit"),
    Wrong(
        "buckets",
        "leaves the last byte free",
        (("used + size > limit", "used + size >= limit"),),
        says="as long as they fit",
    ),
    Wrong(
        "buckets",
        "takes frozen parameters",
        (("[each for each in parameters if each.requires_grad]", "list(parameters)"),),
        says="requires_grad=False",
    ),
    Wrong(
        "buckets",
        "leaves out what has no gradient",
        (("each.requires_grad]", "each.grad is not None]"),),
        says="its gradient is None here",
    ),
    Wrong("buckets", "mixes types", ((" or group[0].dtype != parameter.dtype", ""),), says="mixes float32 and float64"),
    Wrong(
        "buckets",
        "drops what is larger than the limit",
        (("if each.requires_grad]", "if each.requires_grad and each.numel() * each.element_size() <= limit]"),),
        says="gets its own group",
    ),
    Wrong(
        "buckets",
        "loses the last group",
        (("            used += size\n", "            used += size\n        self.groups.pop()\n"),),
        says="the last group is lost",
    ),
    Wrong(
        "buckets",
        "skips a missing gradient",
        (
            (
                "            gradient = parameter.grad if parameter.grad is not None else "
                "torch.zeros_like(parameter)\n",
                "            gradient = parameter.grad\n            if gradient is None:\n                continue\n",
            ),
        ),
        says="counts as zeros",
    ),
    Wrong(
        "buckets",
        "flattens the weights",
        (
            (
                "            gradient = parameter.grad if parameter.grad is not None else "
                "torch.zeros_like(parameter)\n",
                "            gradient = parameter.detach()\n",
            ),
        ),
        says="parameters' values",
    ),
    Wrong(
        "buckets",
        "adds instead of writing",
        (("parameter.grad.copy_(gradient)", "parameter.grad += gradient"),),
        says="replace it, do not add",
    ),
    Wrong(
        "buckets",
        "writes into a copy",
        (("parameter.grad.copy_(gradient)", "parameter.grad.clone().copy_(gradient)"),),
        says="is the old one",
    ),
    Wrong(
        "buckets",
        "leaves missing gradients missing",
        (("                parameter.grad = gradient.clone()", "                continue"),),
        says="is still None",
    ),
    Wrong(
        "buckets",
        "begins every part at the start",
        (
            (
                "        parts = flat.split([parameter.numel() for parameter in group])",
                "        parts = [flat[: parameter.numel()] for parameter in group]",
            ),
        ),
        says="where each part begins and ends",
    ),
    Wrong(
        "buckets",
        "parts in the other order",
        (
            (
                "        parts = flat.split([parameter.numel() for parameter in group])",
                "        parts = list(reversed(flat.split([parameter.numel() for parameter in reversed(group)])))",
            ),
        ),
        says="where each part begins and ends",
    ),
    # overlap
    Wrong(
        "overlap",
        "starts everything in finish",
        (("            self.start()\n\n    def start", "            break\n\n    def start"),),
        says="nothing overlaps",
        fast=True,
    ),
    Wrong(
        "overlap",
        "starts a bucket when it is full, in any order",
        (
            (
                "        while len(self.started) < len(self.missing) and self.missing[len(self.started)] == 0:\n"
                "            self.start()",
                "        if self.missing[index] == 0:\n"
                "            flat = self.buckets.flatten(index)\n"
                "            self.out_of_order.append((index, flat, dist.all_reduce(flat, async_op=True)))",
            ),
            (
                "        while len(self.started) < len(self.missing):\n"
                "            self.start()\n"
                "        for index, (flat, work) in enumerate(self.started):",
                "        seen = [index for index, _, _ in self.out_of_order]\n"
                "        for index in range(len(self.missing)):\n"
                "            if index not in seen:\n"
                "                flat = self.buckets.flatten(index)\n"
                "                self.out_of_order.append((index, flat, dist.all_reduce(flat, async_op=True)))\n"
                "        for index, flat, work in self.out_of_order:",
            ),
            (
                "        self.started: list[tuple[Tensor, dist.Work]] = []",
                "        self.started, self.out_of_order = [], []",
            ),
        ),
        says="in different orders",
        fast=True,
    ),
    Wrong(
        "overlap",
        "waits in the hook",
        (
            (
                "        self.started.append((flat, dist.all_reduce(flat, async_op=True)))",
                "        work = dist.all_reduce(flat, async_op=True)\n"
                "        work.wait()\n"
                "        self.started.append((flat, work))",
            ),
        ),
        says="the hook waits for the all_reduce",
    ),
    Wrong(
        "overlap",
        "calls a blocking all_reduce",
        (
            (
                "        self.started.append((flat, dist.all_reduce(flat, async_op=True)))",
                "        dist.all_reduce(flat)\n        self.started.append((flat, None))",
            ),
            ("            work.wait()\n", ""),
        ),
        says="the hook waits for the all_reduce",
    ),
    Wrong(
        "overlap",
        "does not divide",
        (("flat / dist.get_world_size())", "flat)"),),
        says="the sum over the 3 ranks, not the mean",
    ),
    Wrong(
        "overlap",
        "divides twice",
        (("flat / dist.get_world_size())", "flat / dist.get_world_size() ** 2)"),),
        says="divided twice",
    ),
    Wrong(
        "overlap",
        "does not count anew",
        (
            (
                "            self.buckets.unflatten(index, flat / dist.get_world_size())\n        self.reset()",
                "            self.buckets.unflatten(index, flat / dist.get_world_size())",
            ),
        ),
        says="step",
    ),
    Wrong(
        "overlap",
        "forgets buckets without all gradients",
        (
            (
                "        while len(self.started) < len(self.missing):\n            self.start()\n        for index",
                "        for index",
            ),
        ),
        says="finish() must start the buckets",
    ),
    Wrong(
        "overlap",
        "starts at the first gradient of a bucket",
        (
            (
                "self.missing[len(self.started)] == 0",
                "self.missing[len(self.started)] < len(self.buckets.groups[len(self.started)])",
            ),
        ),
        says="before all its gradients had",
    ),
    Wrong("overlap", "does not wait", (("            work.wait()\n", ""),), says="is"),
    Wrong(
        "overlap",
        "writes back before the wait",
        (
            (
                "            work.wait()\n            self.buckets.unflatten(index, flat / dist.get_world_size())",
                "            self.buckets.unflatten(index, self.buckets.flatten(index) / dist.get_world_size())\n"
                "            work.wait()",
            ),
        ),
        says="own gradient alone",
    ),
    Wrong(
        "overlap",
        "hooks before the gradient is there",
        (
            (
                "parameter.register_post_accumulate_grad_hook(lambda _, index=index: self.arrived(index))",
                "parameter.register_hook(lambda _, index=index: self.arrived(index))",
            ),
        ),
        says="before all its gradients had",
    ),
    Wrong(
        "overlap",
        "one call per parameter",
        (
            (
                "        self.started.append((flat, dist.all_reduce(flat, async_op=True)))",
                "        works = [dist.all_reduce(part, async_op=True) for part in flat.tensor_split(2)]\n"
                "        works[0].wait\n"
                "        self.started.append((flat, works))",
            ),
            ("            work.wait()\n", "            [each.wait() for each in work]\n"),
        ),
        says="one per bucket and step",
    ),
    Wrong(
        "overlap",
        "only the first bucket overlaps",
        (
            (
                "        while len(self.started) < len(self.missing) and self.missing[len(self.started)] == 0:",
                "        if not self.started and self.missing[0] == 0:",
            ),
        ),
        says="only 1 of 4 buckets started before backward ended",
    ),
    Wrong(
        "overlap",
        "the result stays in the flat tensor",
        (
            (
                "            self.buckets.unflatten(index, flat / dist.get_world_size())\n",
                "            flat /= dist.get_world_size()\n",
            ),
        ),
        says="own gradient alone",
    ),
    # ring-order
    Wrong(
        "ring-order",
        "ranks as they are",
        (("        if value > best:", "        if best == (-1.0, -1.0):"),),
        says="as they are numbered",
        fast=True,
    ),
    Wrong(
        "ring-order",
        "forgets the closing link",
        (
            ("zip(order, order[1:] + order[:1], strict=True)", "itertools.pairwise(order)"),
            ("value = (min(links), sum(links))", "value = (min(links, default=0), sum(links))"),
        ),
        says="the closing link",
        fast=True,
    ),
    Wrong(
        "ring-order",
        "the largest sum",
        (("value = (min(links), sum(links))", "value = (sum(links), min(links))"),),
        says="the sum of the links is made as large as possible",
    ),
    Wrong(
        "ring-order",
        "the other direction",
        (("speed[a][b] for a, b", "speed[b][a] for a, b"),),
        says="against the direction",
    ),
    Wrong(
        "ring-order",
        "the fastest link instead of the slowest",
        (("value = (min(links), sum(links))", "value = (max(links), sum(links))"),),
        says="the fastest link is made as fast as possible",
    ),
    Wrong(
        "ring-order",
        "numbers are times, not speeds",
        (
            ("value = (min(links), sum(links))", "value = (-max(links), -sum(links))"),
            ("best, chosen = (-1.0, -1.0), [0]", "best, chosen = (-1e9, -1e9), [0]"),
        ),
        says="taken for times",
    ),
    Wrong(
        "ring-order",
        "the slowest link alone",
        (("value = (min(links), sum(links))", "value = (min(links), 0)"),),
        says="the larger sum of links",
    ),
    Wrong(
        "ring-order",
        "the last of equal rings",
        (("if value > best:", "if value >= best:"),),
        says="comes first in the order of the lists",
    ),
    Wrong(
        "ring-order",
        "loses a rank",
        (("    return chosen\n", "    return chosen[:-1] or [0]\n"),),
        says="must be in it once",
    ),
    Wrong(
        "ring-order",
        "starts elsewhere",
        (("    return chosen\n", "    return chosen[1:] + chosen[:1]\n"),),
        says="does not start with rank 0",
    ),
    Wrong(
        "ring-order",
        "rank 0 at the end again",
        (("    return chosen\n", "    return [*chosen, 0]\n"),),
        says="must be in it once",
    ),
    Wrong(
        "ring-order",
        "chooses among equals by chance",
        (
            (
                "        if value > best:",
                "        if value > best or (value == best and __import__('random').random() < 0.5):",
            ),
        ),
        says="nothing may be left to chance",
    ),
    Wrong(
        "ring-order",
        "changes the matrix",
        (
            (
                "    best, chosen = (-1.0, -1.0), [0]\n",
                "    best, chosen = (-1.0, -1.0), [0]\n"
                "    for rank in range(len(speed)):\n"
                "        speed[rank][rank] = -1\n",
            ),
        ),
        says="changed the matrix",
    ),
    Wrong(
        "ring-order",
        "the fastest next link each time",
        (
            (
                "    for rest in itertools.permutations(range(1, len(speed))):\n        order = [0, *rest]\n",
                "    for rest in [()]:\n"
                "        order = [0]\n"
                "        while len(order) < len(speed):\n"
                "            order.append(max((rank for rank in range(len(speed)) if rank not in order), key=lambda "
                "rank: speed[order[-1]][rank]))\n",
            ),
        ),
        says="each rank took the fastest link",
    ),
    # hierarchical-all-reduce
    Wrong(
        "hierarchical-all-reduce",
        "ring over all ranks",
        (
            (
                "    ring_all_reduce(tensor, leaders)\n",
                "    ring_all_reduce(tensor, leaders)\n    return\n    dist.get_rank()\n",
            ),
            ("    if rank != members[0]:\n", "    ring_all_reduce(tensor)\n    return\n    if rank != members[0]:\n"),
        ),
        says="only one rank per host",
        fast=True,
    ),
    Wrong(
        "hierarchical-all-reduce",
        "leaders do not sum",
        (("    ring_all_reduce(tensor, leaders)\n", ""),),
        says="the sum over its own host alone",
        fast=True,
    ),
    Wrong(
        "hierarchical-all-reduce",
        "members do not get the total",
        (
            ("        dist.recv(tensor, members[0])\n        return", "        return"),
            ("    for member in members[1:]:\n        dist.send(tensor, member)\n", ""),
        ),
        says="its own tensor, unchanged",
    ),
    Wrong(
        "hierarchical-all-reduce",
        "members get the sum of their host",
        (
            (
                "    ring_all_reduce(tensor, leaders)\n"
                "    for member in members[1:]:\n"
                "        dist.send(tensor, member)\n",
                "    for member in members[1:]:\n"
                "        dist.send(tensor, member)\n"
                "    ring_all_reduce(tensor, leaders)\n",
            ),
        ),
        says="the sum over its own host alone",
    ),
    Wrong(
        "hierarchical-all-reduce",
        "the leader forgets its members",
        (("        tensor += incoming\n    ring", "        pass\n    ring"),),
        says="it should be the sum over all ranks, each once",
    ),
    Wrong(
        "hierarchical-all-reduce",
        "adds twice",
        (("        tensor += incoming\n    ring", "        tensor += 2 * incoming\n    ring"),),
        says="2 x rank",
    ),
    Wrong(
        "hierarchical-all-reduce",
        "takes neighbours for one host",
        (
            (
                "[other for other, host in enumerate(hosts) if host == hosts[rank]]",
                "[rank // 2 * 2, rank // 2 * 2 + 1]",
            ),
            ("sorted({host: other for other, host in reversed(list(enumerate(hosts)))}.values())", "[0, 2]"),
        ),
        says="only one rank per host",
    ),
    Wrong(
        "hierarchical-all-reduce",
        "each rank is a leader",
        (
            (
                "sorted({host: other for other, host in reversed(list(enumerate(hosts)))}.values())",
                "list(range(len(hosts)))",
            ),
        ),
        says="all ranks must agree on the leaders",
    ),
    Wrong(
        "hierarchical-all-reduce",
        "leaders in different orders",
        (
            (
                "sorted({host: other for other, host in reversed(list(enumerate(hosts)))}.values())",
                "[members[0], *(other for other in range(len(hosts)) if hosts[other] != hosts[rank] and other == "
                "hosts.index(hosts[other]))]",
            ),
        ),
        says="agree on the leaders and their order",
    ),
    Wrong(
        "hierarchical-all-reduce",
        "leaders send everything to all leaders twice",
        (
            (
                "    ring_all_reduce(tensor, leaders)\n",
                "    own = tensor.clone()\n"
                "    for other in leaders:\n"
                "        if other != rank:\n"
                "            swap(own, other, incoming, other)\n"
                "            swap(own, other, incoming, other)\n"
                "            tensor += incoming\n",
            ),
        ),
        says="bytes travelled between hosts",
    ),
    Wrong(
        "hierarchical-all-reduce",
        "takes the mean",
        (
            (
                "    ring_all_reduce(tensor, leaders)\n",
                "    ring_all_reduce(tensor, leaders)\n    tensor /= len(hosts)\n",
            ),
        ),
        says="the mean; it should be the sum",
    ),
    Wrong(
        "hierarchical-all-reduce",
        "the leader receives last what is sent first",
        (
            (
                "        dist.send(tensor, members[0])\n        dist.recv(tensor, members[0])\n",
                "        dist.recv(tensor, members[0])\n        dist.send(tensor, members[0])\n",
            ),
        ),
        says="each send needs its receive",
    ),
    Wrong(
        "hierarchical-all-reduce",
        "calls torch's own",
        (("    ring_all_reduce(tensor, leaders)\n", "    dist.all_reduce(tensor)\n"),),
        says="uses torch.distributed.all_reduce",
    ),
    # seen on a learner's way: what looks right in the first step, or on ranks that were forked
    Wrong(
        "ring-reduce-scatter",
        "does not wait for its isend",
        (("    sending.wait()\n", ""),),
        says="never waits for the isend",
        fast=True,
    ),
    Wrong(
        "ring-reduce-scatter",
        "ignores the ring",
        (("order = list(range(dist.get_world_size())) if ring is None else list(ring)", ALL_RANKS),),
        says="it sends only to the next rank",
    ),
    Wrong(
        "ring-reduce-scatter",
        "works for ever without a message",
        ((SCATTER_STEPS, "    while size:\n        position += 1\n" + SCATTER_STEPS),),
        says="not finished",
    ),
    Wrong(
        "ring-all-gather",
        "does not wait for its isend",
        (("    sending.wait()\n", ""),),
        says="never waits for the isend",
    ),
    Wrong(
        "ring-all-gather",
        "ignores the ring",
        (("order = list(range(dist.get_world_size())) if ring is None else list(ring)", ALL_RANKS),),
        says="it sends only to the next rank",
    ),
    Wrong(
        "ring-all-reduce",
        "does not wait for its isend",
        (("    sending.wait()\n", ""),),
        says="never waits for the isend",
    ),
    Wrong(
        "overlap",
        "keeps the counts of the first step",
        (
            (
                "            self.buckets.unflatten(index, flat / dist.get_world_size())\n        self.reset()",
                KEEPS_COUNTS,
            ),
        ),
        says="does finish() reset the counts for the next step?",
        fast=True,
    ),
    Wrong(
        "overlap",
        "its hook works in the first step only",
        (
            (
                "        self.missing[index] -= 1\n",
                "        if getattr(self, 'over', False):\n            return\n        self.missing[index] -= 1\n",
            ),
            (
                "flat / dist.get_world_size())\n        self.reset()",
                "flat / dist.get_world_size())\n        self.over = True\n        self.reset()",
            ),
        ),
        says="nothing overlaps in step 1",
    ),
    Wrong(
        "overlap",
        "waits for the future",
        (("            work.wait()\n", "            work.get_future().wait()\n"),),
        says="Use work.wait()",
    ),
    Wrong(
        "ring-order",
        "returns other things than ranks",
        (("    return chosen\n", "    return [0.0, None]\n"),),
        says="it should return a list of ranks",
    ),
    Wrong(
        "hierarchical-all-reduce",
        "sums without a message",
        (("    if rank != members[0]:\n", THROUGH_STORE + "    if rank != members[0]:\n"),),
        says="sent 0 bytes in 0 messages",
        fast=True,
    ),
    Wrong(
        "hierarchical-all-reduce",
        "does not wait for its isend",
        (("        dist.send(tensor, member)\n", "        dist.isend(tensor, member)\n"),),
        says="never waits for the isend",
    ),
    Wrong(
        "hierarchical-all-reduce",
        "leaders in the order of a set",
        (
            (
                "sorted({host: other for other, host in reversed(list(enumerate(hosts)))}.values())",
                "[hosts.index(host) for host in set(hosts)]",
            ),
        ),
        says="that of a set, or by hash(), differs between processes",
    ),
    Wrong(
        "hierarchical-all-reduce",
        "a barrier between the parts",
        (("    ring_all_reduce(tensor, leaders)\n", "    dist.barrier()\n    ring_all_reduce(tensor, leaders)\n"),),
        says="uses torch.distributed.barrier",
    ),
)

EVEN_ODD = """
def swap(outgoing, target, incoming, source):
    if dist.get_rank() % 2 == 0:
        dist.send(outgoing, target)
        dist.recv(incoming, source)
    elif True:
        dist.recv(incoming, source)
        dist.send(outgoing, target)
"""
RECEIVE_EARLY = """
def swap(outgoing, target, incoming, source):
    receiving = dist.irecv(incoming, source)
    dist.send(outgoing, target)
    receiving.wait()
"""
BATCHED = """
def swap(outgoing, target, incoming, source):
    operations = [dist.P2POp(dist.isend, outgoing, target), dist.P2POp(dist.irecv, incoming, source)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
"""

RIGHT = (
    Right("ring-reduce-scatter", "even ranks send first", EVEN_ODD),
    Right("ring-reduce-scatter", "receive early", RECEIVE_EARLY),
    Right("ring-reduce-scatter", "a batch of two operations", BATCHED),
    Right("ring-all-gather", "even ranks send first", EVEN_ODD),
    Right(
        "ring-all-gather",
        "receive early, no empty messages",
        """
def ring_all_gather(flat, ring=None):
    position, size, target, source = neighbours(ring)
    chunks = split_chunks(flat, size)
    for step in range(size - 1):
        works = []
        outgoing, incoming = chunks[(position + 1 - step) % size], chunks[(position - step) % size]
        if incoming.numel():
            works.append(dist.irecv(incoming, source))
        if outgoing.numel():
            works.append(dist.isend(outgoing, target))
        for work in works:
            work.wait()
""",
    ),
    Right("ring-all-reduce", "a batch of two operations", BATCHED),
    Right(
        "ring-all-reduce",
        "a copy for tensors that are not contiguous",
        """
def ring_all_reduce(tensor, ring=None):
    if not tensor.is_contiguous():
        copy = tensor.clone(memory_format=torch.contiguous_format)
        ring_all_reduce(copy, ring)
        tensor.copy_(copy)
        return
    if ring is not None and len(ring) == 1:
        return
    ring_reduce_scatter(tensor.view(-1), ring)
    ring_all_gather(tensor.view(-1), ring)
""",
    ),
    Right(
        "buckets",
        "an index per group and torch's own flatten",
        """
class Buckets:
    def __init__(self, parameters, limit):
        self.groups, left = [], limit
        for parameter in list(parameters)[::-1]:
            if not parameter.requires_grad:
                continue
            size = parameter.nbytes
            fits = bool(self.groups) and size <= left and self.groups[-1][-1].dtype is parameter.dtype
            if fits:
                self.groups[-1].append(parameter)
                left -= size
            else:
                self.groups.append([parameter])
                left = limit - size

    def flatten(self, index):
        group = self.groups[index]
        flat = torch.zeros(sum(each.numel() for each in group), dtype=group[0].dtype)
        start = 0
        for each in group:
            if each.grad is not None:
                flat[start : start + each.numel()] = each.grad.flatten()
            start += each.numel()
        return flat

    def unflatten(self, index, flat):
        start = 0
        for each in self.groups[index]:
            each.grad = flat[start : start + each.numel()].view_as(each)
            start += each.numel()
""",
    ),
    Right(
        "buckets",
        "torch's helpers",
        """
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


class Buckets:
    def __init__(self, parameters, limit):
        wanted = [each for each in reversed(list(parameters)) if each.requires_grad]
        self.groups = []
        while wanted:
            group = [wanted.pop(0)]
            while wanted and sum(each.nbytes for each in group) + wanted[0].nbytes <= limit:
                if wanted[0].dtype != group[0].dtype:
                    break
                group.append(wanted.pop(0))
            self.groups.append(group)

    def flatten(self, index):
        group = self.groups[index]
        return _flatten_dense_tensors([torch.zeros_like(each) if each.grad is None else each.grad for each in group])

    def unflatten(self, index, flat):
        for each, part in zip(self.groups[index], _unflatten_dense_tensors(flat, self.groups[index])):
            each.grad = part.clone()
""",
    ),
    Right(
        "overlap",
        "a set of missing parameters, divided before",
        """
class OverlappedAverage:
    def __init__(self, buckets):
        self.buckets = buckets
        self.place = {}
        for index, group in enumerate(buckets.groups):
            for parameter in group:
                self.place[parameter] = index
                parameter.register_post_accumulate_grad_hook(self.hook)
        self.clear()

    def clear(self):
        self.left = [set(map(id, group)) for group in self.buckets.groups]
        self.flats, self.works = [], []

    def hook(self, parameter):
        self.left[self.place[parameter]].discard(id(parameter))
        for index in range(len(self.flats), len(self.left)):
            if self.left[index]:
                break
            self.launch(index)

    def launch(self, index):
        flat = self.buckets.flatten(index) / dist.get_world_size()
        self.flats.append(flat)
        self.works.append(dist.all_reduce(flat, async_op=True))

    def finish(self):
        for index in range(len(self.flats), len(self.left)):
            self.launch(index)
        for work in self.works:
            work.wait()
        for index, flat in enumerate(self.flats):
            self.buckets.unflatten(index, flat)
        self.clear()
""",
    ),
    Right(
        "overlap",
        "closures and a dictionary of works",
        """
class OverlappedAverage:
    def __init__(self, buckets):
        self.buckets, self.ready, self.works = buckets, {}, {}
        for index, group in enumerate(buckets.groups):
            for parameter in group:
                def hook(parameter, index=index):
                    self.ready[index] = self.ready.get(index, 0) + 1
                    self.advance(lambda index: self.ready.get(index, 0) == len(buckets.groups[index]))
                parameter.register_post_accumulate_grad_hook(hook)

    def advance(self, allowed):
        while len(self.works) < len(self.buckets.groups) and allowed(len(self.works)):
            index = len(self.works)
            flat = self.buckets.flatten(index)
            self.works[index] = (dist.all_reduce(flat, op=dist.ReduceOp.SUM, async_op=True), flat)

    def finish(self):
        self.advance(lambda index: True)
        for index, (work, flat) in self.works.items():
            work.wait()
            self.buckets.unflatten(index, flat.div_(dist.get_world_size()))
        self.ready, self.works = {}, {}
""",
    ),
    Right(
        "ring-order",
        "max with a key",
        """
def ring_order(speed):
    def value(order):
        links = [speed[order[place - 1]][order[place]] for place in range(len(order))]
        return (min(links), sum(links))

    return list(max(((0, *rest) for rest in itertools.permutations(range(1, len(speed)))), key=value))
""",
    ),
    Right(
        "ring-order",
        "recursion",
        """
def ring_order(speed):
    found = []

    def extend(order, slowest, total):
        if len(order) == len(speed):
            closing = speed[order[-1]][0]
            found.append((-min(slowest, closing), -(total + closing), order))
        for rank in range(len(speed)):
            if rank not in order:
                link = speed[order[-1]][rank]
                extend([*order, rank], min(slowest, link), total + link)

    extend([0], float("inf"), 0)
    return min(found)[2]
""",
    ),
    Right(
        "hierarchical-all-reduce",
        "the first leader collects",
        """
def hierarchical_all_reduce(tensor, hosts):
    rank = dist.get_rank()
    leader = {host: hosts.index(host) for host in hosts}
    above = 0 if rank == leader[hosts[rank]] else leader[hosts[rank]]
    members = [other for other in range(len(hosts)) if other != rank and hosts[other] == hosts[rank]]
    below = members if rank == leader[hosts[rank]] else []
    if rank == 0:
        below += [other for other in leader.values() if other != 0]
    for other in below:
        incoming = torch.empty_like(tensor)
        dist.recv(incoming, other)
        tensor.add_(incoming)
    if rank != 0:
        dist.send(tensor, above)
        dist.recv(tensor, above)
    for other in below:
        dist.send(tensor, other)
""",
    ),
    Right(
        "hierarchical-all-reduce",
        "the highest rank leads, members in any order",
        """
def hierarchical_all_reduce(tensor, hosts):
    rank = dist.get_rank()
    members = sorted(other for other in range(len(hosts)) if hosts[other] == hosts[rank])
    leaders = sorted(max(other for other in range(len(hosts)) if hosts[other] == host) for host in set(hosts))
    boss = members.pop()
    if rank != boss:
        dist.isend(tensor.clone(), boss).wait()
        dist.irecv(tensor, boss).wait()
        return
    buffers = [torch.empty_like(tensor) for _ in members]
    for work in [dist.irecv(buffer, member) for buffer, member in zip(buffers, members)]:
        work.wait()
    for buffer in buffers:
        tensor += buffer
    if len(leaders) > 1:
        ring_all_reduce(tensor, leaders)
    for work in [dist.isend(tensor, member) for member in members]:
        work.wait()
""",
    ),
)
