"""Answers to template_fault_tolerance.py: wrong ones with the message that each must get, and other right ones."""

from __future__ import annotations

from wrong import Right, Wrong

WRITE = """        with open(temporary, "wb") as file:
            file.write(hashlib.sha256(payload).digest() + payload)
            file.flush()
            os.fsync(file.fileno())  # the content is on the disk before the name is
        os.replace(temporary, path)
"""
PRUNE = """        for old in self._paths()[: -self.keep]:
            old.unlink()
"""
CHECKSUM = "if hashlib.sha256(content[32:]).digest() == content[:32]:"
PIECE = "            file.write(hashlib.sha256(payload).digest() + payload)\n"
TAIL = "            file.write(payload[-9:])\n"
FLUSH = "            file.flush()\n"
SYNC = "            os.fsync(file.fileno())  # the content is on the disk before the name is\n"
TEMPORARY = 'temporary = path.with_suffix(".tmp")'
NAME = 'path = self.folder / f"step-{step:09d}.pt"'

SAVING = (
    Wrong(
        "atomic-checkpoint",
        "written in place",
        ((WRITE, WRITE.replace("temporary", "path").replace("        os.replace(path, path)\n", "")),),
        says="straight into step-",
        fast=True,
    ),
    Wrong("atomic-checkpoint", "no sync", ((SYNC, ""),), says="never synced"),
    Wrong(
        "atomic-checkpoint",
        "sync before flush",
        ((PIECE + FLUSH, PIECE.replace("payload)\n", "payload[:-9])\n") + TAIL),),
        says="call flush() first",
    ),
    Wrong(
        "atomic-checkpoint",
        "sync after the rename",
        (
            (
                FLUSH + SYNC + "        os.replace(temporary, path)\n",
                "        os.replace(temporary, path)\n        with open(path, 'rb') as file:\n" + SYNC,
            ),
        ),
        says="os.fsync comes after the rename",
    ),
    Wrong(
        "atomic-checkpoint",
        "temporary file elsewhere",
        ((TEMPORARY, 'temporary = self.folder.parent / "new"'),),
        says="outside the folder of the checkpoints",
    ),
    Wrong(
        "atomic-checkpoint",
        "names sorted as text",
        ((NAME, NAME.replace(":09d", "")),),
        says="file names are compared as text",
    ),
    Wrong(
        "atomic-checkpoint",
        "no checksum",
        ((CHECKSUM, "if True:"),),
        says="one bit of the newest checkpoint was flipped",
        fast=True,
    ),
    Wrong(
        "atomic-checkpoint",
        "errors of reading for a checksum",
        (
            (CHECKSUM + "\n", "if self._readable(content[32:]):\n"),
            (
                "    def _paths(self)",
                "    def _readable(self, content: bytes) -> bool:\n"
                "        try:\n"
                "            torch.load(io.BytesIO(content))\n"
                "        except Exception:\n"
                "            return False\n"
                "        return True\n"
                "\n"
                "    def _paths(self)",
            ),
        ),
        says="one bit of the newest checkpoint was flipped",
    ),
    Wrong(
        "atomic-checkpoint",
        "a damaged file is an error",
        (
            (
                "        if paths:\n            raise",
                "            raise RuntimeError('damaged')\n        if paths:\n            raise",
            ),
        ),
        says="with one flipped bit in the newest of three checkpoints, load() raised RuntimeError",
    ),
    Wrong(
        "atomic-checkpoint",
        "all damaged is a new start",
        (
            (
                "        if paths:\n"
                '            raise RuntimeError(f"all {len(paths)} checkpoints in {self.folder} are damaged")\n',
                "",
            ),
        ),
        says="all three checkpoints are damaged, and load() returned None",
    ),
    Wrong(
        "atomic-checkpoint",
        "keeps all",
        ((PRUNE, ""),),
        says="with keep=2, the checkpoints of the steps [8, 9, 10, 11, 12]",
    ),
    Wrong(
        "atomic-checkpoint",
        "keeps one too many",
        ((PRUNE, PRUNE.replace("-self.keep", "-self.keep - 1")),),
        says="[10, 11, 12]",
    ),
    Wrong(
        "atomic-checkpoint",
        "removes the newest",
        ((PRUNE, PRUNE.replace("[: -self.keep]", "[self.keep :]")),),
        says="the checkpoints of the steps [8, 9]",
    ),
    Wrong(
        "atomic-checkpoint",
        "old one removed before the save",
        (
            (PRUNE, ""),
            (
                "        buffer = io.BytesIO()\n",
                "        for old in self._paths()[: len(self._paths()) + 1 - self.keep]:\n"
                "            old.unlink()\n"
                "        buffer = io.BytesIO()\n",
            ),
        ),
        says="the old checkpoint must stay until the new one has its name",
    ),
    Wrong(
        "atomic-checkpoint",
        "checkpoints only in memory",
        (
            ('sorted(self.folder.glob("step-*.pt"))', "self.__dict__.setdefault('known', [])"),
            ("        return path\n", "        self._paths().append(path)\n        return path\n"),
        ),
        says="load() of a new CheckpointStore returned None",
    ),
    Wrong(
        "atomic-checkpoint",
        "returns nothing",
        (("            old.unlink()\n        return path\n", "            old.unlink()\n"),),
        says="save() returned None",
    ),
    Wrong(
        "complete-state",
        "no optimizer",
        (
            (
                '        training.optimizer.load_state_dict(state["optimizer"])\n        training.scheduler',
                "        training.scheduler",
            ),
        ),
        says="the optimizer (its moments) is not as it was",
        fast=True,
    ),
    Wrong(
        "complete-state",
        "no copy",
        (("return copy.deepcopy(state)", "return state"),),
        says="the captured state had changed",
        fast=True,
    ),
    Wrong(
        "complete-state",
        "a shallow copy",
        (("return copy.deepcopy(state)", "return dict(state)"),),
        says="the captured state had changed",
    ),
    Wrong(
        "complete-state",
        "no scheduler",
        (('        training.scheduler.load_state_dict(state["scheduler"])\n', ""),),
        says="the scheduler is not as it was",
    ),
    Wrong(
        "complete-state",
        "parameters without buffers",
        (
            (
                '        training.model.load_state_dict(state["model"])\n',
                "        for name, parameter in training.model.named_parameters():\n"
                "            parameter.data.copy_(state['model'][name])\n",
            ),
        ),
        says="the buffers of the model",
    ),
    Wrong(
        "complete-state",
        "no random state of torch",
        (("        torch.set_rng_state(torch_state)\n", ""),),
        says="the random state of torch is not",
    ),
    Wrong(
        "complete-state",
        "a seed for a random state",
        (("        torch.set_rng_state(torch_state)\n", "        torch.manual_seed(0)\n"),),
        says="the random state of torch is not",
    ),
    Wrong(
        "complete-state",
        "no random state of Python",
        (("        random.setstate(python_state)\n", ""),),
        says="the random state of Python",
    ),
    Wrong(
        "complete-state",
        "no random state of numpy",
        (("        numpy.random.set_state(numpy_state)\n", ""),),
        says="the random state of numpy",
    ),
    Wrong(
        "complete-state",
        "the epoch begins anew",
        (
            (
                'training.epoch, training.position = state["data"]',
                'training.epoch = state["data"][0]\n        training.position = 0',
            ),
        ),
        says="the position in the epoch is not",
    ),
    Wrong(
        "complete-state",
        "no epoch",
        (('training.epoch, training.position = state["data"]', 'training.position = state["data"][1]'),),
        says="the epoch of the data is not",
    ),
    Wrong(
        "complete-state",
        "no weights",
        (('        training.model.load_state_dict(state["model"])\n', ""),),
        says="the weights of the model is not",
    ),
    Wrong(
        "complete-state",
        "a new optimizer with old groups",
        (
            (
                '        training.optimizer.load_state_dict(state["optimizer"])\n        training.scheduler',
                '        training.optimizer.param_groups[0]["lr"] = state["optimizer"]["param_groups"][0]["lr"]\n'
                "        training.scheduler",
            ),
        ),
        says="the optimizer (its moments)",
    ),
    Wrong(
        "complete-state",
        "capture reseeds",
        (
            (
                '        state = {\n            "model"',
                '        torch.manual_seed(1)\n        state = {\n            "model"',
            ),
        ),
        says="capture() must change nothing",
    ),
    Wrong(
        "complete-state",
        "random drawn while restoring",
        (
            (
                "        training.epoch, training.position",
                "        random.random()\n        training.epoch, training.position",
            ),
            (
                "        random.setstate(python_state)\n",
                "        random.setstate(python_state)\n        random.random()\n",
            ),
        ),
        says="the random state of Python",
    ),
    Wrong(
        "complete-state",
        "the snapshot trains on after restore",
        (("        state = copy.deepcopy(state)  # an optimizer", "        # an optimizer"),),
        says="a second restore() from the same snapshot",
        fast=True,
    ),
    Wrong(
        "atomic-checkpoint",
        "a rename to its own name",
        (('        temporary = path.with_suffix(".tmp")\n', "        temporary = path\n"),),
        says="wrote straight into",
    ),
    Wrong(
        "atomic-checkpoint",
        "flush for large content only",
        (("            file.flush()\n", "            if len(payload) > 4096:\n                file.flush()\n"),),
        says="flush() first",
    ),
)

LOOK = 'value = self.store.get(key) if self.store.check([key]) else b""'
HUNG = 'elif unchanged > self.hung_after and not doing.endswith(b"waiting"):'
DETECTION = (
    Wrong(
        "detect-failure",
        "waiting ranks are accused",
        ((HUNG, "elif unchanged > self.hung_after:"),),
        says="wait",
        fast=True,
    ),
    Wrong(
        "detect-failure",
        "beats only",
        ((HUNG, "elif False:"),),
        says="a thread that beats does not show that the training gets on",
        fast=True,
    ),
    Wrong(
        "detect-failure",
        "blocking get",
        ((LOOK, "value = self.store.get(key)"),),
        says="Store.get() blocks until the key is there",
    ),
    Wrong(
        "detect-failure",
        "a beat that never changes",
        (("self.beats += 1\n", "self.beats = 1\n"),),
        says="'dead': with dead_after",
    ),
    Wrong(
        "detect-failure",
        "one key for all ranks",
        (('self.store.set(f"beat/{self.rank}"', 'self.store.set("beat/0"'),),
        says="'dead'",
    ),
    Wrong(
        "detect-failure",
        "times of other clocks",
        (
            ("str(self.beats)", "str(self.clock())"),
            (
                "        return value, self.clock() - since",
                "        if key.startswith('beat') and value:\n"
                "            return value, self.clock() - float(value)\n"
                "        return value, self.clock() - since",
            ),
        ),
        says="times of two machines cannot be compared",
    ),
    Wrong(
        "detect-failure",
        "dead limit for hung",
        ((HUNG, HUNG.replace("hung_after", "dead_after")),),
        says="it is slow, not failed",
    ),
    Wrong(
        "detect-failure",
        "hung limit for dead",
        (("if silent > self.dead_after:", "if silent > self.hung_after:"),),
        says="stopped beating 1.8 s ago and failures() says {}",
    ),
    Wrong(
        "detect-failure",
        "half the limit",
        (("if silent > self.dead_after:", "if silent > self.dead_after / 2:"),),
        says="s after its last beat: dead_after is",
    ),
    Wrong(
        "detect-failure",
        "half the limit for hung",
        ((HUNG, HUNG.replace("hung_after", "hung_after * 0.85")),),
        says="s after its last progress: hung_after is",
    ),
    Wrong(
        "detect-failure",
        "waiting ranks cannot be dead",
        (
            (
                "if silent > self.dead_after:",
                'if doing.endswith(b"waiting"):\n                continue\n            if silent > self.dead_after:',
            ),
        ),
        says="while it waited in a collective",
    ),
    Wrong(
        "detect-failure",
        "absent ranks are forgotten",
        ((LOOK, LOOK + "\n        if not value:\n            return value, 0.0"),),
        says="rank 3 never came",
    ),
    Wrong(
        "detect-failure",
        "a failure is for ever",
        (("        found = {}\n", "        found = self.__dict__.setdefault('found', {})\n"),),
        says="it should say what is true now",
    ),
    Wrong(
        "detect-failure",
        "dead is called hung",
        (('found[rank] = "dead"', 'found[rank] = "hung"'),),
        says="it should name it 'dead'",
    ),
    Wrong(
        "detect-failure",
        "hung is called dead",
        (('found[rank] = "hung"', 'found[rank] = "dead"'),),
        says="which should be 'hung'",
    ),
    Wrong(
        "detect-failure",
        "only a greater step is progress",
        (
            (
                "if value != before:",
                "smaller = before and key[0] == 'p' and int(value.split()[0]) < int(before.split()[0])\n"
                "        if value != before and not smaller:",
            ),
            ("        self.seen[key] = (value, since)", "            self.seen[key] = (value, since)"),
        ),
        says="a smaller step is a change, too",
    ),
)

FAILED = "    failed = next(rank for rank, code in enumerate(codes) if code)\n"
KILL = "    for process in ranks:\n        process.kill()\n"
JOIN = "    for process in ranks:\n        process.join()\n"
COUNT = "failures = 1 if last_step() > before else failures + 1"
LIMITS = "if failures == PATIENCE or restarts == max_restarts:"
PAUSE = "sleep(backoff * 2 ** (failures - 1))"
RECOVERY = (
    Wrong(
        "automatic-recovery",
        "survivors are not killed",
        ((KILL, ""),),
        says="kill the others when one has failed",
        fast=True,
    ),
    Wrong("automatic-recovery", "survivors are left alone", ((KILL + JOIN, ""),), says="(not killed)"),
    Wrong("automatic-recovery", "killed but not joined", ((JOIN, ""),), says="killed but not joined"),
    Wrong(
        "automatic-recovery",
        "one rank after the other",
        (
            (
                "    while not any(codes := [process.exitcode for process in ranks]):\n"
                "        if None not in codes:\n"
                "            return None\n"
                "        sleep(0.05)\n",
                "    for process in ranks:\n"
                "        process.join()\n"
                "    codes = [process.exitcode for process in ranks]\n"
                "    if not any(codes):\n"
                "        return None\n",
            ),
        ),
        says="join() waits for rank 0",
    ),
    Wrong("automatic-recovery", "no sleep", (("        sleep(0.05)\n", ""),), says="keeps a core busy"),
    Wrong(
        "automatic-recovery",
        "signals are good ends",
        (
            (
                "any(codes := [process.exitcode for process in ranks])",
                "any(map((0).__lt__, filter(None, (codes := [process.exitcode for process in ranks]))))",
            ),
        ),
        says="waits for ever after a rank has failed",
    ),
    Wrong(
        "automatic-recovery",
        "over when the first has ended",
        (("        if None not in codes:\n", "        if 0 in codes:\n"),),
        says="while ranks still ran",
    ),
    Wrong(
        "automatic-recovery",
        "no end without progress",
        ((LIMITS, "if restarts == max_restarts:"),),
        says="after the third failure from one checkpoint",
        fast=True,
    ),
    Wrong("automatic-recovery", "progress is not counted", ((COUNT, "failures += 1"),), says="Such a run gets on"),
    Wrong(
        "automatic-recovery",
        "one restart too many",
        (("restarts == max_restarts", "restarts > max_restarts"),),
        says="with max_restarts=2 the ranks are started 3 times at most",
    ),
    Wrong(
        "automatic-recovery",
        "one restart too few",
        (("restarts == max_restarts", "restarts + 1 == max_restarts"),),
        says="with max_restarts=2 the ranks are started 3 times at most",
    ),
    Wrong(
        "automatic-recovery",
        "no backoff",
        ((PAUSE, "sleep(backoff)"),),
        says="doubled for each failure from the same checkpoint",
    ),
    Wrong(
        "automatic-recovery",
        "pauses only grow",
        ((PAUSE, "sleep(backoff * 2**restarts)"),),
        says="progress sets the pause back",
    ),
    Wrong(
        "automatic-recovery",
        "the wrong rank is named",
        (("failed = next(rank for rank, code in enumerate(codes) if code)", "failed = 0"),),
        says="name the rank that failed first",
    ),
    Wrong(
        "automatic-recovery",
        "codes read after the kill",
        (
            (
                FAILED + KILL + JOIN,
                KILL + JOIN + "    codes = [process.exitcode for process in ranks]\n" + FAILED,
            ),
        ),
        says="name the rank that failed first",
    ),
    Wrong(
        "automatic-recovery", "always generation 0", (("start(restarts)", "start(0)"),), says="start() got generation 0"
    ),
    Wrong(
        "automatic-recovery",
        "starts again after the end",
        (("            return restarts\n", "            restarts += 0\n"),),
        says="the run should have ended after 1",
    ),
    Wrong(
        "automatic-recovery",
        "a sleep of its own",
        (("        sleep(0.05)\n", "        time.sleep(0.05)\n"),),
        says="use the sleep that was given",
    ),
)

TOTAL = "total = min(self.global_batch, len(self.order) - self.position)"
SHARE = "return self.order[self.position : self.position + self.global_batch][rank::world]"
ELASTIC = (
    Wrong(
        "elastic",
        "mean of each share",
        ((".mean(1).sum() / total", ".mean() / dist.get_world_size()"),),
        says="the gradient is the sum over all samples",
        fast=True,
    ),
    Wrong(
        "elastic",
        "divided by the world again",
        ((".sum() / total", ".sum() / total / dist.get_world_size()"),),
        says="the gradient is the sum over all samples",
    ),
    Wrong(
        "elastic",
        "no division",
        ((".mean(1).sum() / total", ".mean(1).sum()"),),
        says="the gradient is the sum over all samples",
    ),
    Wrong(
        "elastic",
        "last batch divided as a full one",
        ((".sum() / total", ".sum() / self.global_batch"),),
        says="the gradient is the sum over all samples",
    ),
    Wrong(
        "elastic",
        "gradients stay local",
        (("            dist.all_reduce(parameter.grad)\n", "            pass\n"),),
        says="the gradient is the sum over all samples",
    ),
    Wrong(
        "elastic",
        "gradients pile up",
        (("        self.optimizer.zero_grad()\n", ""),),
        says="the gradient is the sum over all samples",
    ),
    Wrong(
        "elastic",
        "empty share skips the collective",
        (
            (
                "        self.optimizer.zero_grad()\n",
                "        if not len(inputs):\n"
                "            self.position += total\n"
                "            return\n"
                "        self.optimizer.zero_grad()\n",
            ),
        ),
        says="rank",
    ),
    Wrong(
        "elastic",
        "the batch grows with the ranks",
        (
            (
                SHARE,
                "size = self.global_batch // 3\n"
                "        first = self.position + rank * size\n"
                "        return self.order[first : first + size]",
            ),
        ),
        says="its size does not depend on the number of ranks",
    ),
    Wrong(
        "elastic",
        "samples that do not divide are lost",
        (
            (
                SHARE,
                "size = self.global_batch // world\n"
                "        batch = self.order[self.position : self.position + self.global_batch]\n"
                "        return batch[rank * size : (rank + 1) * size][: len(batch) // world]",
            ),
        ),
        says="are in no share",
    ),
    Wrong(
        "elastic",
        "shares overlap",
        ((SHARE, "return self.order[self.position : self.position + self.global_batch][rank :: max(1, world - 1)]"),),
        says="is in the shares of two",
        fast=True,
    ),
    Wrong(
        "elastic",
        "the last rank has the rest",
        (
            (
                SHARE,
                "batch = self.order[self.position : self.position + self.global_batch]\n"
                "        size = len(batch) // world\n"
                "        return batch[rank * size : (rank + 1) * size if rank + 1 < world else None]",
            ),
        ),
        says="divide them evenly",
    ),
    Wrong(
        "elastic",
        "the epoch begins anew",
        (("        self.position = states[0][2]\n", "        self.position = 0\n"),),
        says="position",
    ),
    Wrong(
        "elastic",
        "no optimizer state",
        (("        self.optimizer.load_state_dict(states[0][1])\n", ""),),
        says="does not have the optimizer state",
    ),
    Wrong(
        "elastic",
        "weights are not shared",
        (("        self.model.load_state_dict(states[0][0])\n", ""),),
        says="does not have the weights of rank 0",
    ),
    Wrong(
        "elastic",
        "the position of a full batch",
        (("self.position += total", "self.position += self.global_batch"),),
        says="is at position",
    ),
    Wrong(
        "elastic",
        "the position counts the share",
        (("self.position += total", "self.position += len(inputs)"),),
        says="position",
    ),
)

WRONG = (*SAVING, *DETECTION, *RECOVERY, *ELASTIC)

RIGHT = (
    Right(
        "atomic-checkpoint",
        "checksum in the name",
        """
import zlib


class CheckpointStore:
    def __init__(self, folder, keep=3):
        self.folder, self.keep = Path(folder), keep
        os.makedirs(folder, exist_ok=True)

    def save(self, step, state):
        torch.save(state, self.folder / "unfinished")
        with open(self.folder / "unfinished", "rb+") as file:
            checksum = zlib.crc32(file.read())
            os.fsync(file.fileno())
        path = self.folder / f"checkpoint.{step}.{checksum}"
        (self.folder / "unfinished").rename(path)
        for _, old in self.found()[self.keep :]:
            os.remove(old)
        return path

    def found(self):
        files = [(int(path.name.split(".")[1]), path) for path in self.folder.glob("checkpoint.*")]
        return sorted(files, reverse=True)

    def load(self):
        for step, path in self.found():
            if zlib.crc32(path.read_bytes()) == int(path.name.split(".")[2]):
                return step, torch.load(path)
        if self.found():
            raise RuntimeError("all damaged")
        return None
""",
    ),
    Right(
        "atomic-checkpoint",
        "a folder per checkpoint with a checksum beside",
        """
import pickle


class CheckpointStore:
    def __init__(self, folder, keep=3):
        self.folder, self.keep = Path(folder), keep

    def save(self, step, state):
        self.folder.mkdir(exist_ok=True, parents=True)
        content = pickle.dumps({"step": step, "state": state})
        for name, data in ((f"{step}.sum", hashlib.md5(content).digest()), (f"{step}.data", content)):
            descriptor = os.open(self.folder / (name + "-new"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.write(descriptor, data)
            os.fsync(descriptor)
            os.close(descriptor)
            os.rename(self.folder / (name + "-new"), self.folder / name)
        for old in self.steps()[: -self.keep]:
            (self.folder / f"{old}.data").unlink()
            (self.folder / f"{old}.sum").unlink()
        return self.folder / f"{step}.data"

    def steps(self):
        return sorted(int(path.stem) for path in self.folder.glob("*.data"))

    def load(self):
        for step in reversed(self.steps()):
            content = (self.folder / f"{step}.data").read_bytes()
            if hashlib.md5(content).digest() == (self.folder / f"{step}.sum").read_bytes():
                return step, pickle.loads(content)["state"]
        if self.steps():
            raise RuntimeError("damaged")
""",
    ),
    Right(
        "complete-state",
        "one flat dict of bytes",
        """
import pickle


class TrainingState:
    @staticmethod
    def capture(training):
        parts = (training.model, training.optimizer, training.scheduler)
        return {
            "parts": pickle.dumps([part.state_dict() for part in parts]),
            "data": {"epoch": training.epoch, "position": training.position},
            "random": pickle.dumps((random.getstate(), torch.random.get_rng_state(), numpy.random.get_state())),
        }

    @staticmethod
    def restore(training, state):
        parts = (training.model, training.optimizer, training.scheduler)
        for part, kept in zip(parts, pickle.loads(state["parts"]), strict=True):
            part.load_state_dict(kept)
        for name, value in state["data"].items():
            setattr(training, name, value)
        python, of_torch, of_numpy = pickle.loads(state["random"])
        random.setstate(python)
        torch.random.set_rng_state(of_torch)
        numpy.random.set_state(of_numpy)
""",
    ),
    Right(
        "complete-state",
        "through a buffer of torch.save",
        """
class TrainingState:
    names = ("model", "optimizer", "scheduler")

    @classmethod
    def capture(cls, training):
        buffer = io.BytesIO()
        state = {name: getattr(training, name).state_dict() for name in cls.names}
        state |= {"epoch": training.epoch, "position": training.position, "torch": torch.get_rng_state()}
        state |= {"python": random.getstate(), "numpy": numpy.random.get_state()}
        torch.save(state, buffer)
        return {"content": buffer.getvalue()}

    @classmethod
    def restore(cls, training, state):
        state = torch.load(io.BytesIO(state["content"]), weights_only=False)
        for name in cls.names:
            getattr(training, name).load_state_dict(state[name])
        training.epoch, training.position = state["epoch"], state["position"]
        random.setstate(state["python"])
        numpy.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
""",
    ),
    Right(
        "detect-failure",
        "counters by add",
        """
class FailureDetector:
    def __init__(self, store, rank, world, dead_after, hung_after, clock=time.monotonic):
        self.store, self.rank, self.world, self.clock = store, rank, world, clock
        self.limits = (dead_after, hung_after)
        self.last = {(kind, rank): (0, clock()) for kind in ("beat", "change") for rank in range(world)}

    def beat(self):
        self.store.add(f"beat{self.rank}", 1)

    def progress(self, step, waiting):
        self.store.set(f"waiting{self.rank}", "1" if waiting else "0")
        self.store.add(f"change{self.rank}", 1)

    def age(self, kind, rank):
        now, count = self.clock(), self.store.add(f"{kind}{rank}", 0)
        if count != self.last[kind, rank][0]:
            self.last[kind, rank] = (count, now)
        return now - self.last[kind, rank][1]

    def failures(self):
        found = {}
        for rank in range(self.world):
            silent, still = self.age("beat", rank), self.age("change", rank)
            waits = self.store.check([f"waiting{rank}"]) and self.store.get(f"waiting{rank}") == b"1"
            if silent > self.limits[0]:
                found[rank] = "dead"
            elif still > self.limits[1] and not waits:
                found[rank] = "hung"
        return found
""",
    ),
    Right(
        "detect-failure",
        "json records",
        """
import json


class FailureDetector:
    def __init__(self, store, rank, world, dead_after, hung_after, clock=time.monotonic):
        self.store, self.rank, self.clock = store, rank, clock
        self.dead_after, self.hung_after = dead_after, hung_after
        self.number = 0
        self.ranks = [{"beat": None, "doing": None, "beat_at": clock(), "doing_at": clock()} for _ in range(world)]

    def write(self, name, value):
        self.store.set(f"{name}-{self.rank}", json.dumps(value))

    def beat(self):
        self.number += 1
        self.write("beat", self.number)

    def progress(self, step, waiting):
        self.write("doing", [step, bool(waiting)])

    def failures(self):
        result = {}
        for rank, record in enumerate(self.ranks):
            for name in ("beat", "doing"):
                key = f"{name}-{rank}"
                value = json.loads(self.store.get(key)) if self.store.check([key]) else None
                if value != record[name]:
                    record[name], record[name + "_at"] = value, self.clock()
            now = self.clock()
            if now - record["beat_at"] > self.dead_after:
                result[rank] = "dead"
            elif not (record["doing"] or [0, False])[1] and now - record["doing_at"] > self.hung_after:
                result[rank] = "hung"
        return result
""",
    ),
    Right(
        "automatic-recovery",
        "is_alive and a for loop",
        """
def supervise(start, last_step, max_restarts, backoff, sleep):
    pause, again = backoff, 0
    reached = last_step()
    for generation in range(max_restarts + 1):
        ranks = start(generation)
        bad = []
        while not bad and any(process.is_alive() for process in ranks):
            sleep(0.1)
            bad = [(rank, process.exitcode) for rank, process in enumerate(ranks) if process.exitcode not in (None, 0)]
        bad = bad or [(rank, process.exitcode) for rank, process in enumerate(ranks) if process.exitcode]
        if not bad:
            return generation
        for process in ranks:
            if process.is_alive():
                process.kill()
                process.join()
        if last_step() > reached:
            reached, pause, again = last_step(), backoff, 1
        else:
            again += 1
        message = f"rank {bad[0][0]} failed with code {bad[0][1]}"
        if again >= 3:
            raise RuntimeError(message + " again from the same checkpoint")
        if generation < max_restarts:
            sleep(pause)
            pause = pause * 2
    raise RuntimeError(message)
""",
    ),
    Right(
        "automatic-recovery",
        "recursion on the number of restarts",
        """
def supervise(start, last_step, max_restarts, backoff, sleep, restarts=0, failures=0):
    before, ranks = last_step(), start(restarts)
    codes = [None]
    while not any(codes):
        codes = [process.exitcode for process in ranks]
        if codes.count(0) == len(codes):
            return restarts
        sleep(0.2)
    guilty = [rank for rank, code in enumerate(codes) if code][0]
    [process.terminate() for process in ranks]
    [process.join() for process in ranks]
    failures = failures + 1 if last_step() == before else 1
    if failures >= 3 or restarts >= max_restarts:
        raise RuntimeError(f"rank {guilty}: exit code {codes[guilty]}")
    sleep(backoff * 2**failures / 2)
    return supervise(start, last_step, max_restarts, backoff, sleep, restarts + 1, failures)
""",
    ),
    Right(
        "elastic",
        "blocks, and one flat buffer",
        """
class ElasticTraining:
    def __init__(self, model, optimizer, order, global_batch):
        self.model, self.optimizer, self.order, self.global_batch = model, optimizer, order, global_batch
        self.position = 0

    def share(self, rank, world):
        batch = self.order[self.position : self.position + self.global_batch]
        return batch[len(batch) * rank // world : len(batch) * (rank + 1) // world]

    def step(self, inputs, targets):
        self.model.zero_grad()
        ((self.model(inputs) - targets) ** 2).sum().backward()
        flat = torch.cat([p.grad.flatten() for p in self.model.parameters()] + [torch.tensor([float(targets.numel())])])
        dist.all_reduce(flat)
        flat /= flat[-1].clone()
        at = 0
        for p in self.model.parameters():
            p.grad.copy_(flat[at : at + p.numel()].view_as(p))
            at += p.numel()
        self.optimizer.step()
        self.position = min(self.position + self.global_batch, len(self.order))

    def join(self):
        box = [None]
        if dist.get_rank() == 0:
            box = [{"m": self.model.state_dict(), "o": self.optimizer.state_dict(), "p": self.position}]
        dist.broadcast_object_list(box)
        self.model.load_state_dict(box[0]["m"])
        self.optimizer.load_state_dict(box[0]["o"])
        self.position = box[0]["p"]
""",
    ),
    Right(
        "elastic",
        "mean of the share with a weight",
        """
class ElasticTraining:
    def __init__(self, model, optimizer, order, global_batch):
        self.model, self.optimizer, self.order, self.global_batch = model, optimizer, order, global_batch
        self.position = 0

    def share(self, rank, world):
        end = min(self.position + self.global_batch, len(self.order))
        return [self.order[at] for at in range(self.position + rank, end, world)]

    def step(self, inputs, targets):
        count = torch.tensor(len(inputs))
        dist.all_reduce(count)
        self.optimizer.zero_grad()
        weight = len(inputs) / count.item()
        if len(inputs):
            (nn.functional.mse_loss(self.model(inputs), targets) * weight).backward()
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
        self.optimizer.step()
        self.position += int(count)

    def join(self):
        everything = [None] * dist.get_world_size()
        dist.all_gather_object(everything, (self.model.state_dict(), self.optimizer.state_dict(), self.position))
        weights, moments, self.position = everything[0]
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(moments)
""",
    ),
)
