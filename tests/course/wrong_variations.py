"""Answers that fix in mind what may vary: the rank that fails, the step, the seed, the order, the slow one."""

from __future__ import annotations

from wrong import Right, Wrong

WRONG = (
    Wrong(
        "shard-indices",
        "seed + epoch // 2",
        (
            (
                "manual_seed(seed * 1_000_003 + epoch)",
                "manual_seed(seed * 1_000_003 + epoch // 2)",
            ),
        ),
        says="have the same order, with seed",
    ),
    Wrong(
        "shard-indices",
        "seed times epoch",
        (
            (
                "manual_seed(seed * 1_000_003 + epoch)",
                "manual_seed(seed * epoch + epoch)",
            ),
        ),
        says="have the same order, in epoch 0",
    ),
    Wrong(
        "shard-indices",
        "epoch modulo 10",
        (
            (
                "manual_seed(seed * 1_000_003 + epoch)",
                "manual_seed(seed * 1_000_003 + epoch % 10)",
            ),
        ),
        says="The epochs 0 and 10 have the same order",
    ),
    Wrong(
        "shard-indices",
        "epochs after the fifth are alike",
        (
            (
                "manual_seed(seed * 1_000_003 + epoch)",
                "manual_seed(seed * 1_000_003 + min(epoch, 5))",
            ),
        ),
        says="The epochs 5 and 6 have the same order",
    ),
    Wrong(
        "shard-indices",
        "seed modulo 8",
        (
            (
                "manual_seed(seed * 1_000_003 + epoch)",
                "manual_seed((seed % 8) * 1_000_003 + epoch)",
            ),
        ),
        says="have the same order, in epoch 0",
    ),
    Wrong(
        "shard-indices",
        "ranks in the seed",
        (
            (
                "manual_seed(seed * 1_000_003 + epoch)",
                "manual_seed(seed * 1_000_003 + epoch + world)",
            ),
        ),
        says="It must depend on seed and epoch alone, not on the number of ranks",
    ),
    Wrong(
        "shard-indices",
        "epoch parity",
        (
            (
                "manual_seed(seed * 1_000_003 + epoch)",
                "manual_seed(seed * 1000003 + (epoch & 1))",
            ),
        ),
        says="The epochs 0 and 2 have the same order",
    ),
    Wrong(
        "shard-indices",
        "shift by epoch instead of a new order",
        (
            (
                "generator=generator).tolist()",
                (
                    "generator=torch.Generator().manual_seed(seed)).tolist()\n"
                    "        order = order[epoch % size:] + order[: epoch % size]"
                ),
            ),
        ),
        says="have one order, rotated",
    ),
    Wrong(
        "shard-batches",
        "slices of a sequence that is no list",
        (
            (
                "part = list(samples[first:last])",
                "part = samples[first:last]",
            ),
        ),
        says="they should be a list of ints",
    ),
    Wrong(
        "shard-batches",
        "global batch at least the ranks",
        (
            (
                "batches = []\n",
                "batches = []\n    global_batch = max(global_batch, world)\n",
            ),
        ),
        says="global_batch counts the samples of all ranks",
    ),
    Wrong(
        "shard-batches",
        "short epoch gives none",
        (
            (
                "batches = []\n",
                "batches = []\n    if len(order) < world:\n        return batches\n",
            ),
        ),
        says="the last global batch may be short",
    ),
    Wrong(
        "load-in-background",
        "not woken",
        (
            (
                ("            stopped.set()\n            free.release()\n            thread.join()"),
                "            stopped.set()",
            ),
        ),
        says="thread is blocked for ever",
    ),
    Wrong(
        "load-in-background",
        "a place more than depth",
        (
            (
                "threading.Semaphore(self.depth)",
                "threading.Semaphore(self.depth + 1)",
            ),
        ),
        says="4 finished batches wait",
    ),
    Wrong(
        "load-in-background",
        "a queue of depth, and one in the hand",
        (
            (
                "finished: queue.Queue[Tensor | Exception | None] = queue.Queue()",
                "finished: queue.Queue[Tensor | Exception | None] = queue.Queue(self.depth)",
            ),
            (
                "                free.acquire()\n",
                "",
            ),
            (
                "                free.release()\n                yield",
                "                yield",
            ),
            (
                "            free.release()\n            thread.join()",
                (
                    "            while thread.is_alive():\n"
                    "                try:\n"
                    "                    finished.get_nowait()\n"
                    "                except queue.Empty:\n"
                    "                    time.sleep(0.001)\n"
                    "            thread.join()"
                ),
            ),
        ),
        says="Wait for a free place before you load",
    ),
    Wrong(
        "load-in-background",
        "stop only looked at after the load",
        (
            (
                (
                    "                if stopped.is_set():\n"
                    "                    return\n"
                    "                try:\n"
                    "                    finished.put(self.load(indices))"
                ),
                (
                    "                try:\n"
                    "                    finished.put(self.load(indices))\n"
                    "                    if stopped.is_set():\n"
                    "                        return"
                ),
            ),
        ),
        says="1 more load begins",
    ),
    Wrong(
        "load-in-background",
        "shared state between iterators",
        (
            (
                "        finished: queue.Queue[Tensor | Exception | None] = queue.Queue()\n",
                "        finished = self.__dict__.setdefault('finished', queue.Queue())\n",
            ),
        ),
        says="Each iter() makes its own",
    ),
    Wrong(
        "broadcast-model",
        "through float32",
        (
            (
                "dist.broadcast(tensor.detach(), src=0)",
                (
                    "copy = tensor.detach().float()\n"
                    "        dist.broadcast(copy, src=0)\n"
                    "        tensor.data.copy_(copy)"
                ),
            ),
        ),
        says="exact changed to other values",
    ),
    Wrong(
        "broadcast-model",
        "eval mode",
        (
            (
                "    for tensor in (",
                "    model.eval()\n    for tensor in (",
            ),
        ),
        says="changed the train or eval mode",
    ),
    Wrong(
        "broadcast-model",
        "gradients cleared",
        (
            (
                "dist.broadcast(tensor.detach(), src=0)",
                "dist.broadcast(tensor.detach(), src=0)\n        tensor.grad = None",
            ),
        ),
        says="changed the gradient (param.grad)",
    ),
    Wrong(
        "average-gradients",
        "rank 0 decides whether there is a gradient",
        (
            (
                ("if param.grad is None:\n            param.grad = torch.zeros_like(param)"),
                (
                    "has = torch.tensor(float(param.grad is not None))\n"
                    "        dist.broadcast(has, src=0)\n"
                    "        if not has:\n"
                    "            continue\n"
                    "        if param.grad is None:\n"
                    "            param.grad = torch.zeros_like(param)"
                ),
            ),
        ),
        says="the gradient is still None on this rank",
    ),
    Wrong(
        "average-gradients",
        "frozen gradient removed",
        (
            (
                "            continue\n",
                "            param.grad = None\n            continue\n",
            ),
        ),
        says="leave frozen parameters alone",
    ),
    Wrong(
        "average-gradients",
        "children only",
        (
            (
                "for param in model.parameters():",
                "for param in [p for c in model.children() for p in c.parameters()]:",
            ),
        ),
        says="this rank still has its own gradient",
    ),
    Wrong(
        "synchronous-loop",
        "counts of outputs",
        (
            (
                "summed += loss.item() * len(inputs)",
                "summed += loss.item() * targets.numel()",
            ),
        ),
        says="returned the losses",
    ),
    Wrong(
        "synchronous-loop",
        "losses as tensors",
        (
            (
                "losses.append((summed / total).item())",
                "losses.append(summed / total)",
            ),
        ),
        says="they should be floats",
    ),
    Wrong(
        "synchronous-loop",
        "model left in eval",
        (
            (
                "    broadcast_model(model)\n    losses",
                "    broadcast_model(model)\n    model.eval()\n    losses",
            ),
        ),
        says="left the model in eval mode",
    ),
    Wrong(
        "accumulate-over-ranks",
        "no gradient skips",
        (
            (
                (
                    "        if param.grad is None:\n"
                    "            param.grad = torch.zeros_like(param)\n"
                    "        dist.all_reduce(param.grad)\n"
                    "        param.grad /= tokens"
                ),
                (
                    "        if param.grad is not None:\n"
                    "            dist.all_reduce(param.grad)\n"
                    "            param.grad /= tokens"
                ),
            ),
        ),
        says="one of them may have none",
    ),
    Wrong(
        "accumulate-over-ranks",
        "four micro-batches at most",
        (
            (
                ("    for inputs, targets in micro_batches:\n        loss = summed_token"),
                ("    for inputs, targets in list(micro_batches)[:4]:\n        loss = summed_token"),
            ),
        ),
        says="the update differs by",
    ),
    Wrong(
        "accumulate-over-ranks",
        "asks an iterator for its length",
        (
            (
                ("    for inputs, targets in micro_batches:\n        loss = summed_token"),
                (
                    "    if not len(micro_batches):\n"
                    "        pass\n"
                    "    for inputs, targets in micro_batches:\n"
                    "        loss = summed_token"
                ),
            ),
        ),
        says="has no len()",
    ),
    Wrong(
        "accumulate-over-ranks",
        "empty micro-batch ends",
        (
            (
                ("        loss = summed_token_loss(model, inputs, targets)\n        loss.backward()"),
                (
                    "        if not (targets != IGNORED).any():\n"
                    "            break\n"
                    "        loss = summed_token_loss(model, inputs, targets)\n"
                    "        loss.backward()"
                ),
            ),
        ),
        says="the update differs by",
    ),
    Wrong(
        "loss-scaling",
        "negative inf missed",
        (
            (
                "not grad.isfinite().all()",
                "(grad.isnan().any() or (grad == float('inf')).any())",
            ),
        ),
        says="(0.1, -inf)",
    ),
    Wrong(
        "loss-scaling",
        "first gradient only",
        (
            (
                "for grad in grads)))",
                "for grad in grads[:1])))",
            ),
        ),
        says="rank 0 returned True",
    ),
    Wrong(
        "loss-scaling",
        "last gradient only",
        (
            (
                "for grad in grads)))",
                "for grad in grads[-1:])))",
            ),
        ),
        says="rank 0 returned True",
    ),
    Wrong(
        "loss-scaling",
        "growth once only",
        (
            (
                "            self.good_steps = 0\n        return True",
                "            self.good_steps = -10**9\n        return True",
            ),
        ),
        says="expected True, 512",
    ),
    Wrong(
        "run-pipeline",
        "kept pairs are never removed",
        (
            (
                "entered, left = alive.pop(number)",
                "entered, left = alive[number]",
            ),
        ),
        says="must be taken out of its dictionary or list",
    ),
    Wrong(
        "buckets",
        "zeros of float32",
        (
            (
                "torch.zeros_like(parameter)\n            parts",
                "torch.zeros(parameter.shape)\n            parts",
            ),
        ),
        says="keep the type",
    ),
    Wrong(
        "buckets",
        "4 bytes per element",
        (
            (
                "parameter.numel() * parameter.element_size()",
                "parameter.numel() * 4",
            ),
        ),
        says="an element has element_size() bytes",
    ),
    Wrong(
        "buckets",
        "transposed layout lost",
        (
            (
                "gradient.reshape(-1))",
                (
                    "gradient.t().reshape(-1) if gradient.dim() == 2 and not "
                    "gradient.is_contiguous() else gradient.reshape(-1))"
                ),
            ),
        ),
        says="in the order of the group",
    ),
    Wrong(
        "buckets",
        "flatten clears the gradient",
        (
            (
                "            parts.append(gradient.reshape(-1))",
                ("            parts.append(gradient.reshape(-1).clone())\n            parameter.grad = None"),
            ),
        ),
        says="it leaves the gradients as they are",
    ),
    Wrong(
        "server-async",
        "one worker first",
        (
            (
                "        sender = dist.recv(incoming)\n",
                ("        sender = dist.recv(incoming, 1) if len(log) == 0 else dist.recv(incoming)\n"),
            ),
        ),
        says="receive from any rank",
    ),
    Wrong(
        "server-async",
        "last worker first",
        (
            (
                "        sender = dist.recv(incoming)\n",
                ("        sender = dist.recv(incoming, workers[-1]) if len(log) == 0 else dist.recv(incoming)\n"),
            ),
        ),
        says="receive from any rank",
    ),
    Wrong(
        "bounded-staleness",
        "late push applied",
        (
            (
                ("            if worker in self.done:\n                self.weights -= self.rate * gradient"),
                (
                    "            if worker:\n"
                    "                self.weights -= self.rate * gradient\n"
                    "            if worker in self.done:\n"
                    "                pass"
                ),
            ),
        ),
        says="the server applied that push",
    ),
    Wrong(
        "bounded-staleness",
        "late push answered",
        (
            (
                "            if worker in self.done:\n",
                (
                    "            if worker and worker not in self.done:\n"
                    "                dist.send(self.weights, worker)\n"
                    "            if worker in self.done:\n"
                ),
            ),
        ),
        says="the server answered it",
    ),
    Wrong(
        "bounded-staleness",
        "worker 1 never given up",
        (
            (
                "            if waiting and time",
                "            if waiting and worker > 1 and time",
            ),
        ),
        says="the server must give it up",
    ),
    Wrong(
        "bounded-staleness",
        "last worker never given up",
        (
            (
                "            if waiting and time",
                "            if waiting and worker < dist.get_world_size() - 1 and time",
            ),
        ),
        says="the server must give it up",
    ),
    Wrong(
        "bounded-staleness",
        "bound 0 as 1",
        (
            (
                "bound, patience\n",
                "max(bound, 1), patience\n",
            ),
        ),
        says="with bound=0 it must wait",
    ),
    Wrong(
        "atomic-checkpoint",
        "temporary file has the name of a checkpoint",
        (
            (
                'temporary = path.with_suffix(".tmp")',
                'temporary = self.folder / f"step-{step * 10000:09d}.pt"',
            ),
        ),
        says="a name that load() takes for a checkpoint",
    ),
    Wrong(
        "atomic-checkpoint",
        "temporary file has the name of the next step",
        (
            (
                'temporary = path.with_suffix(".tmp")',
                'temporary = self.folder / f"step-{step + 1:09d}.pt"',
            ),
        ),
        says="a name that load() takes for a checkpoint",
    ),
    Wrong(
        "atomic-checkpoint",
        "checksum of the first bytes",
        (
            (
                "hashlib.sha256(payload).digest() + payload",
                "hashlib.sha256(payload[:4096]).digest() + payload",
            ),
            (
                "hashlib.sha256(content[32:]).digest() == content[:32]",
                "hashlib.sha256(content[32:4128]).digest() == content[:32]",
            ),
        ),
        says="keep a checksum of the whole content",
    ),
    Wrong(
        "atomic-checkpoint",
        "five digits",
        (
            (
                'path = self.folder / f"step-{step:09d}.pt"',
                'path = self.folder / f"step-{step:05d}.pt"',
            ),
        ),
        says="more digits than the file name has leading zeros for",
    ),
    Wrong(
        "atomic-checkpoint",
        "modification time order",
        (
            (
                'return sorted(self.folder.glob("step-*.pt"))',
                'return sorted(self.folder.glob("step-*.pt"), key=lambda p: p.stat().st_mtime)',
            ),
        ),
        says="not of the latest time",
    ),
    Wrong(
        "atomic-checkpoint",
        "removes what it did not write",
        (
            (
                ("        for old in self._paths()[: -self.keep]:\n            old.unlink()"),
                (
                    "        for old in [p for p in self.folder.iterdir() if p not in "
                    "self._paths()[-self.keep:]]:\n"
                    "            old.unlink()"
                ),
            ),
        ),
        says="remove old checkpoints, nothing else",
    ),
    Wrong(
        "atomic-checkpoint",
        "load looks at keep files only",
        (
            (
                "        paths = self._paths()\n        for",
                "        paths = self._paths()[-self.keep:]\n        for",
            ),
        ),
        says="load() looks at all that are there",
    ),
    Wrong(
        "complete-state",
        "new scheduler only last epoch",
        (
            (
                'training.scheduler.load_state_dict(state["scheduler"])',
                'training.scheduler.last_epoch = state["scheduler"]["last_epoch"]',
            ),
        ),
        says="the scheduler is not as it was",
    ),
    Wrong(
        "complete-state",
        "without position",
        (
            (
                '"data": (training.epoch, training.position)',
                '"data": (training.epoch, 0)',
            ),
        ),
        says="the position in the epoch is not as it was",
    ),
    Wrong(
        "complete-state",
        "epoch ignored if zero position",
        (
            (
                'training.epoch, training.position = state["data"]',
                ('training.epoch, training.position = state["data"] if state["data"][1] else (0, 0)'),
            ),
        ),
        says="the epoch of the data is not as it was",
    ),
    Wrong(
        "detect-failure",
        "rank 0 not watched",
        (
            (
                "for rank in range(self.world):\n            _,",
                "for rank in range(1, self.world):\n            _,",
            ),
        ),
        says="rank 0 ",
    ),
    Wrong(
        "detect-failure",
        "waits 3 times",
        (
            (
                'not doing.endswith(b"waiting")',
                '(not doing.endswith(b"waiting") or unchanged > 3 * self.hung_after)',
            ),
        ),
        says="however long it waits",
    ),
    Wrong(
        "detect-failure",
        "waits 10 times",
        (
            (
                'not doing.endswith(b"waiting")',
                '(not doing.endswith(b"waiting") or unchanged > 10 * self.hung_after)',
            ),
        ),
        says="however long it waits",
    ),
    Wrong(
        "detect-failure",
        "counted from first look",
        (
            (
                'self.seen.get(key, (b"", self.started))',
                'self.seen.get(key, (b"", self.clock()))',
            ),
        ),
        says="counts from the start, not from the first look",
    ),
    Wrong(
        "detect-failure",
        "stops at the first",
        (
            (
                '                found[rank] = "dead"\n',
                '                found[rank] = "dead"\n                break\n',
            ),
        ),
        says="it should name all ranks that have failed",
    ),
    Wrong(
        "detect-failure",
        "never progressed is not hung",
        (
            (
                "elif unchanged > self.hung_after and",
                "elif doing and unchanged > self.hung_after and",
            ),
        ),
        says="has shown no progress at all",
    ),
    Wrong(
        "detect-failure",
        "beats wrap",
        (
            (
                'self.beats += 1\n        self.store.set(f"beat',
                'self.beats = (self.beats + 1) % 2\n        self.store.set(f"beat',
            ),
        ),
        says="a value that it has not written before",
    ),
    Wrong(
        "detect-failure",
        "only a greater value is a change",
        (
            (
                "if value != before:",
                "if value > before:",
            ),
        ),
        says="not only a greater one",
    ),
    Wrong(
        "automatic-recovery",
        "the last code after the kill is named",
        (
            (
                ("failed = next(rank for rank, code in enumerate(codes) if code)\n    for"),
                "for",
            ),
            (
                "        process.join()\n    return",
                (
                    "        process.join()\n"
                    "    codes = [process.exitcode for process in ranks]\n"
                    "    failed = [rank for rank, code in enumerate(codes) if code][-1]\n"
                    "    return"
                ),
            ),
        ),
        says="it should name the rank that failed first",
    ),
    Wrong(
        "automatic-recovery",
        "always the last rank",
        (
            (
                "next(rank for rank, code in enumerate(codes) if code)",
                "len(codes) - 1",
            ),
        ),
        says="it should name the rank that failed first",
    ),
    Wrong(
        "automatic-recovery",
        "rank 0 is not watched",
        (
            (
                "while not any(codes := [process.exitcode for process in ranks]):",
                "while not any((codes := [process.exitcode for process in ranks])[1:]):",
            ),
        ),
        says="waits for ever after a rank has failed",
    ),
    Wrong(
        "automatic-recovery",
        "one restart at least",
        (
            (
                "or restarts == max_restarts",
                "or restarts == max(max_restarts, 1)",
            ),
        ),
        says="with max_restarts=0 the first failure is the end",
    ),
    Wrong(
        "elastic",
        "buffers of rank 0",
        (
            (
                "states = [(self.model.state_dict()",
                "states = [(dict(self.model.named_parameters())",
            ),
            (
                "load_state_dict(states[0][0])",
                "load_state_dict(states[0][0], strict=False)",
            ),
        ),
        says="does not have the buffers",
    ),
    Wrong(
        "elastic",
        "the number of ranks of the first call",
        (
            (
                "[rank::world]",
                "[rank :: (self.__dict__.setdefault('world', world))]",
            ),
        ),
        says="are in no share",
    ),
    Wrong(
        "elastic",
        "the larger position counts",
        (
            (
                "        self.position = states[0][2]",
                "        self.position = max(self.position, states[0][2])",
            ),
        ),
        says="come earlier or later in the epoch",
    ),
    Wrong(
        "elastic",
        "lr kept",
        (
            (
                "        self.optimizer.load_state_dict(states[0][1])",
                (
                    "        groups = self.optimizer.state_dict()['param_groups']\n"
                    "        self.optimizer.load_state_dict({'state': states[0][1]['state'], "
                    "'param_groups': groups})"
                ),
            ),
        ),
        says="(the learning rate)",
    ),
    Wrong(
        "metrics-over-ranks",
        "rank of the largest absolute value",
        (
            (
                "rank = int(ranks[values.argmax()])",
                "rank = int(ranks[values.abs().argmax()])",
            ),
        ),
        says="the rank that had the largest value",
    ),
    Wrong(
        "metrics-over-ranks",
        "names in alphabetical order",
        (
            (
                "zip(self.names, columns",
                "zip(sorted(self.names), columns",
            ),
        ),
        says="the smallest value of all steps",
    ),
    Wrong(
        "metrics-over-ranks",
        "smallest absolute value",
        (
            (
                "values.min().item()",
                "values.abs().min().item()",
            ),
        ),
        says="the smallest value of all steps",
    ),
    Wrong(
        "find-stragglers",
        "lower median over ranks",
        (
            (
                "usual / usual.quantile(0.5)",
                "usual / usual.median()",
            ),
        ),
        says="torch.median takes the lower one",
    ),
    Wrong(
        "find-stragglers",
        "lower median over steps",
        (
            (
                "usual = compute.quantile(0.5, dim=1)",
                "usual = compute.median(dim=1).values",
            ),
        ),
        says="torch.median takes the lower one",
    ),
    Wrong(
        "find-stragglers",
        "a limit that is a little low",
        (
            (
                "slowdown > self.factor",
                "slowdown >= self.factor * 0.97",
            ),
        ),
        says="factor=1.3",
    ),
    Wrong(
        "find-stragglers",
        "lost without the worst alone",
        (
            (
                "compute[~slow].amax(0)",
                "compute[slowdown < slowdown.max()].amax(0)",
            ),
        ),
        says="slowest of the ranks that are not named",
    ),
    Wrong(
        "find-stragglers",
        "transfer of the fastest step",
        (
            (
                "transfer.mean().item()",
                "transfer.min().item()",
            ),
        ),
        says="a mean over the steps",
    ),
    Wrong(
        "find-stragglers",
        "slowdowns of all ranks",
        (
            (
                "for rank in ranks}",
                "for rank in range(len(slow))}",
            ),
        ),
        says="and for no other",
    ),
    Wrong(
        "profile-step",
        "same name nested double",
        (
            (
                "self.current[name] = self.current.get(name, 0.0) + own",
                (
                    "self.current[name] = self.current.get(name, 0.0) + (seconds if name in [n for n "
                    "in self.current] else own)"
                ),
            ),
        ),
        says="inside one of its own name",
    ),
    Wrong(
        "profile-step",
        "summary resets",
        (
            (
                'return {**parts, "step": sum(parts.values())}',
                ('self.totals, self.steps = {}, 0\n        return {**parts, "step": sum(parts.values())}'),
            ),
        ),
        says="it tells what was measured, and changes nothing",
    ),
    Wrong(
        "compress-gradients",
        "rounded up",
        (
            (
                "int(flat.numel() * self.fraction)",
                "-int(-flat.numel() * self.fraction // 1)",
            ),
        ),
        says="5.7, rounded down",
    ),
    Wrong(
        "compress-gradients",
        "rounded to nearest",
        (
            (
                "int(flat.numel() * self.fraction)",
                "round(flat.numel() * self.fraction)",
            ),
        ),
        says="5.7, rounded down",
    ),
    Wrong(
        "compress-gradients",
        "int8 scale by 128",
        (
            (
                "gradient.abs().max() / 127",
                "gradient.abs().max() / 128",
            ),
        ),
        says="The scale is the largest absolute value over 127",
    ),
    Wrong(
        "hierarchical-all-reduce",
        "leaders exchange all with all",
        (
            (
                "    ring_all_reduce(tensor, leaders)",
                (
                    "    own = tensor.clone()\n"
                    "    for other in leaders:\n"
                    "        if other == rank:\n"
                    "            continue\n"
                    "        sending = dist.isend(own, other)\n"
                    "        dist.recv(incoming, other)\n"
                    "        sending.wait()\n"
                    "        tensor += incoming"
                ),
            ),
        ),
        says="bytes travelled between hosts",
    ),
    Wrong(
        "measure-all-reduce",
        "first call in the median",
        (
            (
                "samples[1:], dtype",
                "samples, dtype",
            ),
        ),
        says="Is the slow first call among those",
    ),
    Wrong(
        "measure-all-reduce",
        "slowest rank after the median",
        (
            (
                (
                    "dist.all_reduce(slowest, op=dist.ReduceOp.MAX)\n"
                    "        seconds.append(statistics.median(slowest.tolist()))"
                ),
                (
                    "slowest = slowest.median()\n"
                    "        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)\n"
                    "        seconds.append(slowest.item())"
                ),
            ),
        ),
        says="the ranks are slow in turn",
    ),
)

RIGHT: tuple[Right, ...] = ()
