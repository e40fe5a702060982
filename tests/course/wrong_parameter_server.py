"""Wrong and other right answers for template_parameter_server.py."""

from __future__ import annotations

from wrong import Right, Wrong

PULL_FIRST = """    dist.recv(weights, SERVER)
    for step in range(steps):
"""
SYNC_FIRST = """    for worker in workers:
        dist.send(weights, worker)
    incoming = torch.empty_like(weights)
    for _ in range(steps):
"""
ASYNC_FIRST = """    for worker in workers:
        dist.send(weights, worker)
    log: list"""
SYNC_LOOP = """        for worker in workers:
            dist.recv(incoming, worker)
            total += incoming
        weights -= rate * total / len(workers)
        for worker in workers:
            dist.send(weights, worker)
"""
ASYNC_LOOP = """        sender = dist.recv(incoming)
        log.append((sender, len(log) - version_of[sender]))
        weights -= rate * incoming
        version_of[sender] = len(log)
        dist.send(weights, sender)
"""
TWO_BY_TWO = """        senders = list(workers)
        for worker in senders:
            dist.recv(incoming, worker)
            log.append((worker, len(log) - version_of[worker]))
            weights -= rate * incoming
            version_of[worker] = len(log)
            dist.send(weights, worker)
"""
ROUNDS = """        pushes = []
        for worker in workers:
            dist.recv(incoming, worker)
            pushes.append((worker, incoming.clone()))
        for worker, push in pushes:
            log.append((worker, len(log) - version_of[worker]))
            weights -= rate * push
            version_of[worker] = len(log)
            dist.send(weights, worker)
"""
PUSH = "        dist.send(gradient(weights, step), SERVER)\n        dist.recv(weights, SERVER)\n"
ORDER = "sorted(pieces, key=lambda piece: (-piece[0], piece[1:]))"

WRONG = (
    # server-sync
    Wrong(
        "server-sync",
        "applies the sum",
        (("rate * total / len(workers)", "rate * total"),),
        says="not their mean",
        fast=True,
    ),
    Wrong(
        "server-sync",
        "counts the server as a worker",
        (("rate * total / len(workers)", "rate * total / dist.get_world_size()"),),
        says="the server is not a worker",
    ),
    Wrong(
        "server-sync",
        "no pull before the first step",
        (
            (PULL_FIRST, "    for step in range(steps):\n"),
            (SYNC_FIRST, "    incoming = torch.empty_like(weights)\n    for _ in range(steps):\n"),
        ),
        says="must pull before the first step",
        fast=True,
    ),
    Wrong(
        "server-sync",
        "adds the gradient",
        (("weights -= rate * total", "weights += rate * total"),),
        says="the gradients were added",
    ),
    Wrong(
        "server-sync",
        "forgets the rate",
        (("weights -= rate * total", "weights -= total"),),
        says="the learning rate is missing",
    ),
    Wrong(
        "server-sync",
        "answers before all have pushed",
        (
            (
                SYNC_LOOP,
                "        for worker in workers:\n"
                "            dist.recv(incoming, worker)\n"
                "            weights -= rate * incoming / len(workers)\n"
                "            dist.send(weights, worker)\n",
            ),
        ),
        says="only after the pushes of all workers",
    ),
    Wrong(
        "server-sync",
        "keeps only the last push",
        (("            total += incoming\n", "            total = incoming * len(workers)\n"),),
        says="alone: the pushes of the others are lost",
    ),
    Wrong(
        "server-sync",
        "does not reset the sum",
        (
            (
                "    for _ in range(steps):\n        total = torch.zeros_like(weights)\n",
                "    total = torch.zeros_like(weights)\n    for _ in range(steps):\n",
            ),
        ),
        says="Is each step one update",
    ),
    Wrong(
        "server-sync",
        "updates a copy",
        (
            (
                "        weights -= rate * total / len(workers)",
                "        weights = weights - rate * total / len(workers)",
            ),
        ),
        says="update the tensor in place",
    ),
    Wrong(
        "server-sync",
        "no pull after the last step",
        (
            (
                PUSH,
                "        dist.send(gradient(weights, step), SERVER)\n"
                "        if step < steps - 1:\n"
                "            dist.recv(weights, SERVER)\n",
            ),
            ("    for _ in range(steps):\n        total", "    for step in range(steps):\n        total"),
            (
                "        weights -= rate * total / len(workers)\n        for worker in workers:\n",
                "        weights -= rate * total / len(workers)\n"
                "        for worker in workers if step < steps - 1 else []:\n",
            ),
        ),
        says="pull after the last step too",
    ),
    Wrong(
        "server-sync",
        "pulls into another tensor",
        (
            (
                PUSH,
                "        dist.send(gradient(weights, step), SERVER)\n"
                "        dist.recv(torch.empty_like(weights), SERVER)\n",
            ),
        ),
        says="at the same weights",
    ),
    Wrong(
        "server-sync",
        "the server computes too",
        (("        total = torch.zeros_like(weights)\n", "        total = gradient(weights, 0)\n"),),
        says="only workers have data",
    ),
    Wrong(
        "server-sync",
        "workers update too",
        ((PUSH, PUSH + "        weights -= 0.01 * gradient(weights, step)\n"),),
        says="computed gradients for the steps",
    ),
    Wrong(
        "server-sync",
        "counts the steps from 1",
        (("gradient(weights, step), SERVER)", "gradient(weights, step + 1), SERVER)"),),
        says="not 0 to",
    ),
    Wrong(
        "server-sync",
        "forgets the last worker",
        (
            (
                "    workers = range(1, dist.get_world_size())\n"
                "    for worker in workers:\n"
                "        dist.send(weights, worker)\n"
                "    incoming",
                "    workers = range(1, dist.get_world_size() - 1)\n"
                "    for worker in workers:\n"
                "        dist.send(weights, worker)\n"
                "    incoming",
            ),
        ),
        says="Each send needs its receive",
    ),
    Wrong(
        "server-sync",
        "uses a collective",
        ((SYNC_LOOP, "        dist.reduce(total, 0)\n"),),
        says="uses torch.distributed.reduce",
    ),
    # server-async
    Wrong(
        "server-async",
        "waits for all workers",
        (("    while len(log) < steps * len(workers):\n", "    for _ in range(steps):\n"), (ASYNC_LOOP, ROUNDS)),
        says="waits for worker",
        fast=True,
    ),
    Wrong(
        "server-async",
        "takes the workers in turn",
        (("    while len(log) < steps * len(workers):\n", "    for _ in range(steps):\n"), (ASYNC_LOOP, TWO_BY_TWO)),
        says="waits for worker",
    ),
    Wrong(
        "server-async",
        "divides by the number of workers",
        (
            (
                "        weights -= rate * incoming\n        version_of",
                "        weights -= rate * incoming / len(workers)\n        version_of",
            ),
        ),
        says="divided by the number of workers",
    ),
    Wrong(
        "server-async",
        "staleness always 0",
        (("len(log) - version_of[sender])", "0)"),),
        says="count the updates since the sender's last pull",
        fast=True,
    ),
    Wrong(
        "server-async",
        "staleness is the version",
        (("len(log) - version_of[sender])", "len(log))"),),
        says="subtract the version that the sender pulled",
    ),
    Wrong(
        "server-async",
        "counts the update itself",
        (("len(log) - version_of[sender])", "len(log) + 1 - version_of[sender])"),),
        says="the update itself does not count",
    ),
    Wrong(
        "server-async",
        "does not remember the pull",
        (("        version_of[sender] = len(log)\n", ""),),
        says="the log says",
    ),
    Wrong(
        "server-async",
        "remembers for all workers at once",
        (("        version_of[sender] = len(log)\n", "        version_of = dict.fromkeys(workers, len(log))\n"),),
        says="the log says",
    ),
    Wrong(
        "server-async",
        "answers before the update",
        (
            (
                "        weights -= rate * incoming\n"
                "        version_of[sender] = len(log)\n"
                "        dist.send(weights, sender)\n",
                "        dist.send(weights, sender)\n"
                "        version_of[sender] = len(log)\n"
                "        weights -= rate * incoming\n",
            ),
        ),
        says="the weights with its push in them",
    ),
    Wrong(
        "server-async",
        "drops stale gradients",
        (
            (
                "        weights -= rate * incoming\n        version_of",
                "        weights -= rate * incoming * (log[-1][1] == 0)\n        version_of",
            ),
        ),
        says="pushes of stale gradients were dropped",
    ),
    Wrong(
        "server-async",
        "makes stale gradients smaller",
        (
            (
                "        weights -= rate * incoming\n        version_of",
                "        weights -= rate * incoming / (1 + log[-1][1])\n        version_of",
            ),
        ),
        says="made smaller by their staleness",
    ),
    Wrong(
        "server-async",
        "adds the gradient",
        (
            (
                "        weights -= rate * incoming\n        version_of",
                "        weights += rate * incoming\n        version_of",
            ),
        ),
        says="the gradients were added",
    ),
    Wrong(
        "server-async",
        "updates a copy",
        (
            (
                "        weights -= rate * incoming\n        version_of",
                "        weights = weights - rate * incoming\n        version_of",
            ),
        ),
        says="do not follow from the pushes",
    ),
    Wrong(
        "server-async",
        "ends too early",
        (("while len(log) < steps * len(workers):", "while len(log) < steps * len(workers) - 1:"),),
        says="Each send needs its receive",
    ),
    Wrong(
        "server-async",
        "no pull before the first step",
        ((PULL_FIRST, "    for step in range(steps):\n"), (ASYNC_FIRST, "    log: list")),
        says="must pull before the first step",
    ),
    Wrong(
        "server-async",
        "forgets the log",
        (("    return log\n", "    return []\n"),),
        says="the server's log has 0 updates",
    ),
    Wrong(
        "server-async",
        "pulls into another tensor",
        (
            (
                PUSH,
                "        dist.send(gradient(weights, step), SERVER)\n"
                "        dist.recv(torch.empty_like(weights), SERVER)\n",
            ),
        ),
        says="at the same weights",
    ),
    # bounded-staleness
    Wrong(
        "bounded-staleness",
        "no bound",
        (("if self.done[worker] - slowest <= self.bound:", "if True:"),),
        says="it must wait at the server",
        fast=True,
    ),
    Wrong(
        "bounded-staleness",
        "a bound one too large",
        (("if self.done[worker] - slowest <= self.bound:", "if self.done[worker] - slowest <= self.bound + 1:"),),
        says="it must wait at the server",
    ),
    Wrong(
        "bounded-staleness",
        "a bound one too small",
        (("if self.done[worker] - slowest <= self.bound:", "if self.done[worker] - slowest < self.bound:"),),
        says="held back before its lead exceeded",
        fast=True,
    ),
    Wrong(
        "bounded-staleness",
        "lockstep",
        (("if self.done[worker] - slowest <= self.bound:", "if self.done[worker] == slowest:"),),
        says="held back before its lead exceeded",
    ),
    Wrong(
        "bounded-staleness",
        "compares with the fastest",
        (("slowest = min(self.done.values(), default=0)", "slowest = max(self.done.values(), default=0)"),),
        says="it must wait at the server",
    ),
    Wrong(
        "bounded-staleness",
        "waits for the silent for ever",
        (("            self.drop_silent()\n", ""),),
        says="must give it up after",
    ),
    Wrong(
        "bounded-staleness",
        "receives in the server's own thread",
        (("threading.Thread(target=receive_all, args=arguments, daemon=True).start()", "receive_all(*arguments)"),),
        says="Each send needs its receive",
    ),
    Wrong(
        "bounded-staleness",
        "a silent worker still counts",
        (
            ("                del self.done[worker]\n", ""),
            ("waiting = steps < self.steps and", "waiting = steps < self.steps and worker not in self.lost and"),
        ),
        says="must give it up after",
    ),
    Wrong(
        "bounded-staleness",
        "gives up workers that have finished",
        (("waiting = steps < self.steps and worker not in self.held", "waiting = worker not in self.held"),),
        says="nor one that has finished",
    ),
    Wrong(
        "bounded-staleness",
        "impatient",
        (("self.heard[worker] > self.patience:", "self.heard[worker] > self.patience / 100:"),),
        says="as the workers given up; it should be []",
    ),
    Wrong(
        "bounded-staleness",
        "drops the push of a worker that it holds back",
        (
            (
                "                self.weights -= self.rate * gradient\n",
                "                ahead = self.done[worker] + 1 - min(self.done.values()) > self.bound\n"
                "                self.weights -= self.rate * gradient * (not ahead)\n",
            ),
        ),
        says="apply each push once",
    ),
    Wrong(
        "bounded-staleness",
        "applies the push again at release",
        (
            (
                "                self.held.discard(worker)\n",
                "                self.held.discard(worker)\n                self.weights -= 0.01\n",
            ),
        ),
        says="apply each push once",
    ),
    Wrong(
        "bounded-staleness",
        "does not return the lost workers",
        (("        return self.lost\n", "        return []\n"),),
        says="returned [] as the workers given up",
    ),
    Wrong(
        "bounded-staleness",
        "all threads share one buffer",
        (
            (
                "    for _ in range(steps):\n"
                "        incoming = torch.empty_like(like)\n"
                "        dist.recv(incoming, worker)\n"
                "        pushes.put((worker, incoming))",
                "    incoming = like\n"
                "    for _ in range(steps):\n"
                "        dist.recv(incoming, worker)\n"
                "        pushes.put((worker, incoming))",
            ),
        ),
        says="apply each push once",
    ),
    Wrong(
        "bounded-staleness",
        "answers no worker after it has given up a worker",
        (
            (
                "                self.held.add(worker)\n            self.drop_silent()\n            self.release()",
                "                self.held.add(worker)\n                self.release()\n            self.drop_silent()",
            ),
        ),
        says="then answer those that waited",
    ),
    # balance-shards
    Wrong(
        "balance-shards",
        "servers take turns",
        (
            (
                "        server = loads.index(min(loads))\n",
                "        server = sum(len(one) for one in plan) % servers\n",
            ),
            (ORDER, "pieces"),
        ),
        says="took turns (round robin): large",
        fast=True,
    ),
    Wrong(
        "balance-shards",
        "takes turns after sorting",
        (("        server = loads.index(min(loads))\n", "        server = sum(len(one) for one in plan) % servers\n"),),
        says="round robin) after sorting",
    ),
    Wrong("balance-shards", "does not sort", ((ORDER, "pieces"),), says="placed as they come", fast=True),
    Wrong(
        "balance-shards",
        "smallest first",
        (("(-piece[0], piece[1:])", "(piece[0], piece[1:])"),),
        says="or as if the smallest piece was placed first",
    ),
    Wrong(
        "balance-shards",
        "counts elements",
        (
            (
                "        for start, end in itertools.pairwise(bounds):\n"
                "            pieces.append(((end - start) * tensor.element_size(), name, start, end))",
                "        for start, end in itertools.pairwise(bounds):\n"
                "            pieces.append((end - start, name, start, end))",
            ),
        ),
        says="as if elements were counted",
    ),
    Wrong(
        "balance-shards",
        "does not cut",
        (
            (
                "        bounds = [tensor.numel() * part // count for part in range(count + 1)]\n",
                "        bounds = [0, tensor.numel()]\n",
            ),
        ),
        says="so cut it into",
    ),
    Wrong(
        "balance-shards",
        "takes the limit for elements",
        (("max(1, largest // tensor.element_size())", "largest"),),
        says="so cut it into",
    ),
    Wrong(
        "balance-shards",
        "loses the end of a tensor",
        (
            (
                "bounds = [tensor.numel() * part // count for part in range(count + 1)]",
                "bounds = [tensor.numel() // count * part for part in range(count + 1)]",
            ),
        ),
        says="are on no server",
    ),
    Wrong(
        "balance-shards",
        "a small piece at the end",
        (
            (
                "bounds = [tensor.numel() * part // count for part in range(count + 1)]",
                "bounds = [min(tensor.numel(), largest // tensor.element_size() * part) for part in range(count + 1)]",
            ),
        ),
        says="differ by at most one element",
    ),
    Wrong(
        "balance-shards",
        "pieces overlap",
        (("plan[server].append((name, start, end))", "plan[server].append((name, max(0, start - 1), end))"),),
        says="is in two pieces",
    ),
    Wrong(
        "balance-shards",
        "cuts too often",
        (("count = -(-tensor.numel() //", "count = 1 + -(-tensor.numel() //"),),
        says="are enough",
    ),
    Wrong(
        "balance-shards",
        "follows the order of the mapping",
        ((ORDER, "sorted(pieces, key=lambda piece: -piece[0])"),),
        says="in another order",
    ),
    Wrong(
        "balance-shards",
        "no list for idle servers",
        (("    return plan\n", "    return [pieces for pieces in plan if pieces]\n"),),
        says="has an empty list",
    ),
    Wrong(
        "balance-shards",
        "everything on the first server",
        (("        server = loads.index(min(loads))\n", "        server = 0\n"),),
        says="has nothing",
    ),
    Wrong(
        "balance-shards",
        "counts tensors, not bytes",
        (("        loads[server] += size\n", "        loads[server] += 1\n"),),
        says="round robin",
    ),
    Wrong(
        "balance-shards",
        "the end is included",
        (("plan[server].append((name, start, end))", "plan[server].append((name, start, end - 1))"),),
        says="on no server",
    ),
    # seen on a learner's way
    Wrong(
        "bounded-staleness",
        "gives up workers that it holds back",
        (
            (
                "            waiting = steps < self.steps and worker not in self.held\n",
                "            waiting = steps < self.steps\n",
            ),
            (
                "                del self.done[worker]\n",
                "                del self.done[worker]\n                self.held.discard(worker)\n",
            ),
        ),
        says="not one that the server holds back",
        fast=True,
    ),
    Wrong(
        "server-async",
        "its log holds other things",
        (("        log.append((sender, len(log) - version_of[sender]))", "        log.append((sender, None))"),),
        says="two int",
    ),
    Wrong(
        "balance-shards",
        "orders equal pieces by hash",
        (("key=lambda piece: (-piece[0], piece[1:])", "key=lambda piece: (-piece[0], hash(piece[1]), piece[2:])"),),
        says="hash() of a string",
        fast=True,
    ),
    Wrong(
        "balance-shards",
        "reads a set",
        (
            (
                "    for name, tensor in tensors.items():\n",
                "    for name, tensor in [(name, tensors[name]) for name in set(tensors)]:\n",
            ),
            ("key=lambda piece: (-piece[0], piece[1:])", "key=lambda piece: -piece[0]"),
        ),
        says="the order of a set",
    ),
    Wrong(
        "balance-shards",
        "pieces without their ends",
        (("plan[server].append((name, start, end))", "plan[server].append((name,))"),),
        says="it should be (name, first element, end)",
    ),
)

RIGHT = (
    Right(
        "server-sync",
        "receives started together, update in parts",
        """
def train_sync(weights, gradient, steps, rate):
    world = dist.get_world_size()
    if dist.get_rank() == SERVER:
        for round in range(steps + 1):
            for work in [dist.isend(weights, worker) for worker in range(1, world)]:
                work.wait()
            if round == steps:
                break
            pushes = [torch.empty_like(weights) for _ in range(1, world)]
            for work in [dist.irecv(push, worker) for worker, push in enumerate(pushes, 1)]:
                work.wait()
            weights.sub_(torch.stack(pushes).mean(0), alpha=rate)
    else:
        for step in range(steps):
            dist.recv(weights, SERVER)
            dist.send(gradient(weights, step), SERVER)
        dist.recv(weights, SERVER)
""",
    ),
    Right(
        "server-sync",
        "pushes in the order of arrival",
        """
def train_sync(weights, gradient, steps, rate):
    if dist.get_rank() != SERVER:
        return work(weights, gradient, steps)
    workers = dist.get_world_size() - 1
    for worker in range(workers):
        dist.send(weights, worker + 1)
    for _ in range(steps):
        pushes = {}
        while len(pushes) < workers:
            push = torch.empty_like(weights)
            pushes[dist.recv(push)] = push
        for push in pushes.values():
            weights -= rate / workers * push
        for worker in pushes:
            dist.send(weights, worker)
""",
    ),
    Right(
        "server-async",
        "a thread per worker",
        """
def train_async(weights, gradient, steps, rate):
    if dist.get_rank() != SERVER:
        work(weights, gradient, steps)
        return []
    log, lock, threads = [], threading.Lock(), []

    def serve(worker):
        seen, push = 0, torch.empty_like(weights)
        for _ in range(steps):
            dist.recv(push, worker)
            with lock:
                log.append((worker, len(log) - seen))
                weights.sub_(rate * push)
                seen, answer = len(log), weights.clone()
            dist.send(answer, worker)

    for worker in range(1, dist.get_world_size()):
        dist.send(weights.clone(), worker)
        threads.append(threading.Thread(target=serve, args=(worker,)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return log
""",
    ),
    Right(
        "server-async",
        "counts since the pull",
        """
def train_async(weights, gradient, steps, rate):
    if dist.get_rank() != SERVER:
        work(weights, gradient, steps)
        return []
    since = {worker: 0 for worker in range(1, dist.get_world_size())}
    for worker in since:
        dist.isend(weights, worker).wait()
    log = []
    for _ in range(steps * len(since)):
        push = torch.zeros_like(weights)
        worker = dist.recv(push, src=None)
        log.append((worker, since[worker]))
        since = {other: count + 1 for other, count in since.items()}
        since[worker] = 0
        weights.add_(push, alpha=-rate)
        dist.send(weights, worker)
    return log
""",
    ),
    Right(
        "bounded-staleness",
        "a thread per worker and a condition",
        """
def train_bounded(weights, gradient, steps, rate, bound, patience):
    if dist.get_rank() != SERVER:
        work(weights, gradient, steps)
        return []
    state = threading.Condition()
    done = {worker: 0 for worker in range(1, dist.get_world_size())}
    asked, finished, lost = {}, set(), []

    def serve(worker):
        for step in range(steps + 1):
            with state:
                state.wait_for(lambda: done.get(worker, 0) - min(done.values()) <= bound)
                answer = weights.clone()
                asked[worker] = time.monotonic()
            dist.send(answer, worker)
            if step == steps:
                break
            push = torch.empty_like(weights)
            dist.recv(push, worker)
            with state:
                del asked[worker]
                if worker in lost:
                    return
                weights.sub_(rate * push)
                done[worker] += 1
                state.notify_all()
        with state:
            del asked[worker]
            finished.add(worker)
            state.notify_all()

    for worker in list(done):
        threading.Thread(target=serve, args=(worker,), daemon=True).start()
    with state:
        while set(done) - finished:
            state.wait(0.02)
            for worker, since in asked.items():
                if worker in done and done[worker] < steps and time.monotonic() - since > patience:
                    lost.append(worker)
                    del done[worker]
                    state.notify_all()
    return lost
""",
    ),
    Right(
        "bounded-staleness",
        "a queue with deadlines",
        """
def train_bounded(weights, gradient, steps, rate, bound, patience):
    if dist.get_rank() != SERVER:
        work(weights, gradient, steps)
        return []
    pushes, count, deadline, held, lost = queue.SimpleQueue(), {}, {}, [], []
    for worker in range(1, dist.get_world_size()):
        count[worker] = 0
        dist.send(weights, worker)
        deadline[worker] = time.monotonic() + patience
        threading.Thread(target=receive_all, args=(worker, weights, steps, pushes), daemon=True).start()
    while deadline or held:
        try:
            left = max(0.001, min(deadline.values()) - time.monotonic())
            worker, push = pushes.get(timeout=left)
            if worker in deadline:
                del deadline[worker]
                weights.sub_(rate * push)
                count[worker] += 1
                held.append(worker)
        except queue.Empty:
            for worker in [each for each, limit in deadline.items() if limit <= time.monotonic()]:
                lost.append(worker)
                del deadline[worker], count[worker]
        for worker in [each for each in held if count[each] <= min(count.values()) + bound]:
            held.remove(worker)
            dist.send(weights, worker)
            if count[worker] < steps:
                deadline[worker] = time.monotonic() + patience
    return lost
""",
    ),
    Right(
        "balance-shards",
        "a heap",
        """
import heapq


def balance_shards(tensors, servers, largest):
    pieces = []
    for name in sorted(tensors):
        tensor = tensors[name]
        most = largest // tensor.element_size()
        count = (tensor.numel() + most - 1) // most
        short, long = divmod(tensor.numel(), count)
        start = 0
        for part in range(count):
            end = start + short + (part < long)
            pieces.append((tensor.element_size() * (end - start), name, start, end))
            start = end
    heap = [(0, server) for server in range(servers)]
    plan = [[] for _ in range(servers)]
    for size, *piece in sorted(pieces, reverse=True):
        load, server = heapq.heappop(heap)
        plan[server].append(tuple(piece))
        heapq.heappush(heap, (load + size, server))
    return plan
""",
    ),
    Right(
        "balance-shards",
        "a fit by bisection",
        """
def balance_shards(tensors, servers, largest):
    pieces = []
    for name, tensor in sorted(tensors.items()):
        count = -(-tensor.numel() // (largest // tensor.element_size()))
        bounds = [round(tensor.numel() * part / count) for part in range(count + 1)]
        pieces += [(tensor.element_size() * (b - a), name, a, b) for a, b in zip(bounds, bounds[1:])]
    pieces.sort(key=lambda piece: (-piece[0], piece[1], piece[2]))

    def fit(limit):
        plan, loads = [[] for _ in range(servers)], [0] * servers
        for size, *piece in pieces:
            server = next((each for each in range(servers) if loads[each] + size <= limit), None)
            if server is None:
                return None
            plan[server].append(tuple(piece))
            loads[server] += size
        return plan

    low, high = 0, sum(piece[0] for piece in pieces)
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fit(middle) else (middle, high)
    return fit(high)
""",
    ),
)
