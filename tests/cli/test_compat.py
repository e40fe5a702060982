"""Code written for the import name `distributed` runs unchanged through compat/: each snippet as its users wrote it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest
from command import ROOT, Answer, clean_environment

from phalanx.config.precision import precision_name

if TYPE_CHECKING:
    from pathlib import Path

_PREPARATION = """
import json, os, sys
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
dataset = TensorDataset(torch.randn(256, 6), torch.arange(256) % 3)
train_loader = DataLoader(dataset, batch_size=8, shuffle=True)
val_loader = DataLoader(TensorDataset(*dataset[:12]), batch_size=8)
results = {}


class MyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x):
        return self.layers(x)


model = MyModel()
before = model.layers[0].weight.clone()
from distributed import PyTorchDDPTrainer
"""

_FIRST_STEPS = """
# Create distributed trainer
trainer = PyTorchDDPTrainer(
    model=model,
    num_gpus=4,
    batch_size=32,
    epochs=100
)

# Train - automatically distributed!
trainer.fit(train_loader, val_loader)
results["ranks"] = json.loads(next(open(next(iter_events()))))["world_size"]
results["trained"] = not torch.equal(before, model.layers[0].weight)
"""

_PYTORCH_DDP = """
trainer = PyTorchDDPTrainer(
    model=MyModel(),
    num_gpus=2,
    batch_size=256,  # Per GPU
    epochs=50,
    learning_rate=0.001,
    mixed_precision=True  # FP16 for speed
)

history = trainer.fit(
    train_loader,
    val_loader,
    checkpoint_dir="./checkpoints",
    mlflow_experiment="distributed-training"
)

print(f"Training time: {history.total_time:.2f}s")
print(f"Final accuracy: {history.best_accuracy:.4f}")
results["time"], results["accuracy"] = history.total_time, history.best_accuracy
results["checkpoint"] = os.path.isfile(os.path.join(history.checkpoint, "manifest.json"))
"""

_CONFIGURATION = """
from distributed import DistributedConfig

config = DistributedConfig(
    # Resources
    num_gpus=8,
    num_nodes=2,
    gpus_per_node=4,

    # Backend
    backend="pytorch-ddp",  # or "horovod", "ray", "tensorflow"

    # Training
    batch_size=32,  # Per GPU
    epochs=100,
    learning_rate=0.001,

    # Optimization
    mixed_precision=True,  # FP16
    gradient_accumulation_steps=4,
    gradient_clipping=1.0,

    # Communication
    communication_backend="nccl",  # or "gloo", "mpi"
    find_unused_parameters=False,

    # Checkpointing
    checkpoint_frequency=10,  # Every 10 epochs
    checkpoint_dir="./checkpoints",

    # Monitoring
    mlflow_tracking=True,
    tensorboard=True,
    log_every_n_steps=100
)
results["config"] = config.to_dict()
"""

_MIXED_PRECISION = """
trainer = PyTorchDDPTrainer(
    model=model,
    mixed_precision=True,
    scaler_init_scale=2**16,  # For numerical stability
    scaler_growth_interval=2000
)
trainer.fit(train_loader)
results["precision"] = json.loads(next(open(next(iter_events()))))["precision"]
"""

_ACCUMULATION = """
trainer = PyTorchDDPTrainer(
    model=model,
    batch_size=32,  # Per GPU
    gradient_accumulation_steps=8  # Effective batch = 32 x 8 x num_gpus
)
trainer.fit(train_loader)
results["global_batch"] = json.loads(next(open(next(iter_events()))))["global_batch"]

trainer = PyTorchDDPTrainer(
    model=model,
    batch_size=64,
    gradient_accumulation_steps=8,  # 64 x 8 = 512
    num_gpus=4
)
results["ranks"] = trainer.config.total_ranks
"""

_POSITIONAL = """
trainer = PyTorchDDPTrainer(model, num_gpus=2)
trainer.fit(train_loader, val_loader)
results["trained"] = not torch.equal(before, model.layers[0].weight)
"""

_TENSORBOARD = """
trainer = PyTorchDDPTrainer(
    model=model,
    tensorboard_dir="./board",
    log_every_n_steps=10
)
trainer.fit(train_loader, val_loader)
results["files"] = os.listdir("board")
"""

_PROFILER = """
trainer = PyTorchDDPTrainer(model)
from torch.profiler import profile, ProfilerActivity

with profile(
    activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
    record_shapes=True
) as prof:
    history = trainer.fit(train_loader, val_loader, max_steps=3)

# View bottlenecks
print(prof.key_averages().table(sort_by="cuda_time_total"))
results["operators"] = [event.key for event in prof.key_averages()]
results["steps"] = history.epochs[-1].step
"""

_RATE_SCALING = """
base_lr = 0.001
base_batch = 32
num_gpus = 4

new_batch = base_batch * num_gpus
new_lr = base_lr * (new_batch / base_batch) ** 0.5

trainer = PyTorchDDPTrainer(
    model=model,
    num_gpus=num_gpus,
    learning_rate=new_lr
)
results["rate"] = trainer.config.learning_rate
"""

_RESUME = """
trainer = PyTorchDDPTrainer(
    model=model,
    checkpoint_frequency=10,
    checkpoint_dir="./kept",
    resume_from_checkpoint=True  # Auto-resume if training crashes
)
trainer.fit(train_loader)
trainer.fit(train_loader, max_steps=5)
results["kept"] = sorted(os.listdir("kept"))
results["resumed"] = [json.loads(next(open(path)))["resumed_from"] for path in iter_events()]
"""

_SAMPLER = """
from torch.utils.data import DataLoader, DistributedSampler
num_gpus, rank, batch_size = 2, 0, 8

# Use DistributedSampler to partition data
sampler = DistributedSampler(
    dataset,
    num_replicas=num_gpus,
    rank=rank
)

train_loader = DataLoader(
    dataset,
    batch_size=batch_size,
    sampler=sampler,
    num_workers=2,  # Multi-threaded loading
    pin_memory=True  # Faster GPU transfer
)
trainer = PyTorchDDPTrainer(model, num_gpus=num_gpus)
trainer.fit(train_loader)
events = [json.loads(line) for line in open(next(iter_events()))]
results["said"] = [event["text"] for event in events if event["event"] == "message"]
results["steps"] = events[-1]["step"]
"""

_SNIPPETS = {
    "first_steps": _FIRST_STEPS,
    "pytorch_ddp": _PYTORCH_DDP,
    "configuration": _CONFIGURATION,
    "mixed_precision": _MIXED_PRECISION,
    "accumulation": _ACCUMULATION,
    "positional": _POSITIONAL,
    "tensorboard": _TENSORBOARD,
    "profiler": _PROFILER,
    "rate_scaling": _RATE_SCALING,
    "resume": _RESUME,
    "sampler": _SAMPLER,
}

# One process for all snippets: each runs in a folder and a namespace of its own, and pays for torch once.
_RUNNER = """
import glob, json, os, sys, traceback

snippets, preparation = json.load(open(sys.argv[1])), open(sys.argv[2]).read()
for name, source in snippets.items():
    os.makedirs(name)
    os.chdir(name)
    # The classes of a script are in __main__, and that is where its snippets expect to be.
    names = {"__name__": "__main__", "iter_events": lambda: iter(glob.glob("runs/*/events.jsonl"))}
    try:
        exec(compile(preparation + source, name, "exec"), names)
        results = names["results"]
    except BaseException:
        results = {"error": traceback.format_exc()}
    os.chdir("..")
    with open(f"{name}.json", "w") as file:
        json.dump(results, file)
"""


def _run(*words: object, cwd: Path, **environment: str) -> Answer:
    """Run Python with `compat/` on its path, as `pip install ./compat` would have it."""
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env=clean_environment(PYTHONPATH=f"{ROOT / 'compat'}:{ROOT}", PHALANX_DEVICE="cpu", **environment),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    return Answer(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What each snippet left in its `results`."""
    folder = tmp_path_factory.mktemp("compat")
    snippets = dict(_SNIPPETS)
    if importlib.util.find_spec("mlflow") is None:
        line = ',\n    mlflow_experiment="distributed-training"'
        assert line in snippets["pytorch_ddp"]
        snippets["pytorch_ddp"] = snippets["pytorch_ddp"].replace(line, "")
    (folder / "snippets.json").write_text(json.dumps(snippets))
    (folder / "preparation.py").write_text(_PREPARATION)
    (folder / "runner.py").write_text(_RUNNER)
    # Nobody waits for a hundred epochs here: the environment stands in for patience.
    answer = _run("runner.py", "snippets.json", "preparation.py", cwd=folder, PHALANX_MAX_STEPS="2")
    assert answer.code == 0, answer.text
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in snippets}


@pytest.fixture
def outcome(outcomes, request):
    """The results of the snippet that the test is named after."""
    results = outcomes[request.node.name.removeprefix("test_")]
    assert "error" not in results, results["error"]
    return results


def test_first_steps(outcome):
    assert outcome == {"ranks": 4, "trained": True}


def test_pytorch_ddp(outcome):
    assert outcome["time"] > 0
    assert 0 <= outcome["accuracy"] <= 1
    assert outcome["checkpoint"]


def test_configuration(outcome):
    config = outcome["config"]
    assert (config["num_gpus"], config["num_nodes"], config["gpus_per_node"]) == (8, 2, 4)
    assert config["communication_backend"] == "nccl"
    assert (config["checkpoint_frequency"], config["log_every_n_steps"]) == (10, 100)


def test_mixed_precision(outcome):
    assert outcome["precision"] == precision_name(True, "cpu"), "what `True` means on a CPU"


def test_accumulation(outcome):
    assert outcome == {"global_batch": 32 * 8, "ranks": 4}


def test_positional(outcome):
    assert outcome["trained"]


def test_tensorboard(outcome):
    assert any("tfevents" in name for name in outcome["files"])


def test_profiler(outcome):
    assert outcome["steps"] == 3
    assert "aten::addmm" in outcome["operators"], "one rank trains in this process, so the profiler sees its operators"


def test_rate_scaling(outcome):
    assert outcome["rate"] == pytest.approx(0.002)


def test_resume(outcome):
    assert outcome["kept"] == ["step-00000002", "step-00000005"]
    assert sorted(outcome["resumed"], key=str) == [None, "kept/step-00000002"]


def test_sampler(outcome):
    assert any("DistributedSampler replaced" in text for text in outcome["said"])
    assert outcome["steps"] == 2


def test_the_command_line_trains_a_script_on_four_ranks(tmp_path):
    (tmp_path / "train.py").write_text(
        textwrap.dedent(
            """
            from torch import nn, randn, zeros
            from torch.utils.data import TensorDataset
            from distributed import PyTorchDDPTrainer

            trainer = PyTorchDDPTrainer(nn.Linear(4, 1), batch_size=2, max_steps=1)
            trainer.fit(TensorDataset(randn(16, 4), zeros(16, 1)))
            """
        )
    )
    words = ("--script", "train.py", "--num-gpus", "4", "--backend", "pytorch-ddp")
    answer = _run("-m", "distributed.cli", "train", *words, cwd=tmp_path)
    assert answer.code == 0, answer.text
    (events,) = tmp_path.glob("runs/*/events.jsonl")
    started = json.loads(events.read_text().splitlines()[0])
    assert (started["world_size"], started["global_batch"]) == (4, 8)


def test_every_name_is_phalanxs_own(tmp_path):
    answer = _run("-c", "import distributed, phalanx\nfor name in distributed.__all__:\n"
                  "    assert getattr(distributed, name) is getattr(phalanx, name), name\n"
                  "from distributed import DistributedTuner, HorovodTrainer, RayTrainer, TensorFlowDistributedTrainer",
                  cwd=tmp_path)  # fmt: skip
    assert answer.code == 0, answer.text
