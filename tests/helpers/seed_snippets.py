"""The calls that code written for `distributed` makes, as text: `tests/journeys/test_seeds.py` runs them."""

from __future__ import annotations

PREPARATION = """
import json, os, sys
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
from distributed import DistributedConfig, PyTorchDDPTrainer

torch.manual_seed(0)
dataset = TensorDataset(torch.randn(256, 6), torch.arange(256) % 3)
train_loader = DataLoader(dataset, batch_size=8, shuffle=True)
val_loader = DataLoader(TensorDataset(*dataset[:12]), batch_size=8)
results = {}


class MyModel(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))

    def forward(self, x):
        return self.layers(x)


def started():
    return json.loads(next(open(next(iter_events()))))


def messages():
    events = [json.loads(line) for line in open(next(iter_events()))]
    return [event["text"] for event in events if event["event"] == "message"]


model = MyModel()
before = model.layers[0].weight.clone()
"""

# Each snippet runs in a folder and a namespace of its own; the classes of a script are in __main__, as it expects.
RUNNER = """
import glob, json, os, sys, traceback

snippets, preparation = json.load(open(sys.argv[1])), open(sys.argv[2]).read()
for name, source in snippets.items():
    os.makedirs(name)
    os.chdir(name)
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

_TORCH = {
    "first_steps": """
trainer = PyTorchDDPTrainer(model=model, num_gpus=4, batch_size=32, epochs=100)
trainer.fit(train_loader, val_loader)
results["ranks"] = started()["world_size"]
results["trained"] = not torch.equal(before, model.layers[0].weight)
""",
    "pytorch_ddp": """
trainer = PyTorchDDPTrainer(
    model=MyModel(), num_gpus=2, batch_size=256, epochs=50, learning_rate=0.001, mixed_precision=True
)
history = trainer.fit(train_loader, val_loader, checkpoint_dir="./checkpoints")
results["time"], results["accuracy"] = history.total_time, history.best_accuracy
results["checkpoint"] = os.path.isfile(os.path.join(history.checkpoint, "manifest.json"))
""",
    "configuration": """
for backend in ("pytorch-ddp", "horovod", "ray", "tensorflow"):
    config = DistributedConfig(
        num_gpus=8, num_nodes=2, gpus_per_node=4, backend=backend, batch_size=32, epochs=100, learning_rate=0.001,
        mixed_precision=True, gradient_accumulation_steps=4, gradient_clipping=1.0, communication_backend="nccl",
        find_unused_parameters=False, checkpoint_frequency=10, checkpoint_dir="./checkpoints", mlflow_tracking=True,
        tensorboard=True, log_every_n_steps=100,
    )
    results[backend] = {**config.to_dict(), "unused": list(config.unused)}
""",
    "mixed_precision": """
trainer = PyTorchDDPTrainer(model=model, mixed_precision=True, scaler_init_scale=2**16, scaler_growth_interval=2000)
trainer.fit(train_loader)
results["precision"] = started()["precision"]
""",
    "accumulation": """
trainer = PyTorchDDPTrainer(model=model, batch_size=32, gradient_accumulation_steps=8)
trainer.fit(train_loader)
results["global_batch"] = started()["global_batch"]
trainer = PyTorchDDPTrainer(model=model, batch_size=64, gradient_accumulation_steps=8, num_gpus=4)
results["ranks"] = trainer.config.total_ranks
""",
    "positional": """
trainer = PyTorchDDPTrainer(model, num_gpus=2)
first = trainer.fit(train_loader, val_loader)
results["trained"] = not torch.equal(before, model.layers[0].weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
trainer = PyTorchDDPTrainer(model, optimizer)
second = trainer.fit(train_loader)
results["steps"] = [first.steps[-1]["step"], second.steps[-1]["step"]]
results["rate"] = second.steps[-1]["learning_rate"]
""",
    "tensorboard": """
trainer = PyTorchDDPTrainer(model=model, tensorboard_dir="./board", log_every_n_steps=10)
history = trainer.fit(train_loader, val_loader)
results["files"], results["logged"] = os.listdir("board"), list(history.steps[-1])
""",
    "profiler": """
from torch.profiler import profile, ProfilerActivity

trainer = PyTorchDDPTrainer(model)
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as prof:
    history = trainer.fit(train_loader, val_loader, max_steps=3)
print(prof.key_averages().table(sort_by="cuda_time_total"))
results["operators"] = [event.key for event in prof.key_averages()]
results["steps"] = history.epochs[-1].step
""",
    "rate_scaling": """
base_lr, base_batch, num_gpus = 0.001, 32, 4
new_lr = base_lr * (base_batch * num_gpus / base_batch) ** 0.5
results["rate"] = PyTorchDDPTrainer(model=model, num_gpus=num_gpus, learning_rate=new_lr).config.learning_rate
""",
    "warmup": """
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
warmup = LinearLR(optimizer, start_factor=0.1, total_iters=2)
main = CosineAnnealingLR(optimizer, T_max=98)
scheduler = SequentialLR(optimizer, schedulers=[warmup, main], milestones=[2])
trainer = PyTorchDDPTrainer(model, optimizer=optimizer, scheduler=scheduler, batch_size=256, epochs=100)
results["rates"] = [epoch.learning_rate for epoch in trainer.fit(train_loader).epochs]
""",
    "resume": """
trainer = PyTorchDDPTrainer(
    model=model, checkpoint_frequency=10, checkpoint_dir="./kept", resume_from_checkpoint=True
)
trainer.fit(train_loader)
trainer.fit(train_loader, max_steps=5)
results["kept"] = sorted(os.listdir("kept"))
results["resumed"] = [json.loads(next(open(path)))["resumed_from"] for path in iter_events()]
""",
    "sampler": """
from torch.utils.data import DistributedSampler

sampler = DistributedSampler(dataset, num_replicas=2, rank=0)
train_loader = DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=2, pin_memory=True)
history = PyTorchDDPTrainer(model, num_gpus=2).fit(train_loader)
results["said"], results["steps"] = messages(), history.epochs[-1].step
""",
    "names": """
import distributed, phalanx
from distributed import DistributedTuner, HorovodTrainer, RayTrainer, TensorFlowDistributedTrainer

results["others"] = [name for name in distributed.__all__ if getattr(distributed, name) is not getattr(phalanx, name)]
""",
    "large_model": """
PyTorchDDPTrainer(model=model, num_gpus=2, zero_stage=3).fit(train_loader)
results["strategy"] = started()["strategy"]
""",
    "compressed_gradients": """
history = PyTorchDDPTrainer(model, num_gpus=2, compression="topk", compression_ratio=0.1).fit(train_loader)
results["sent"], results["plain"] = history.sent_bytes, history.plain_bytes
""",
}

_TRACKED = {
    "mlflow_run": """
import mlflow

mlflow.set_tracking_uri("sqlite:///mlflow.db")
with mlflow.start_run(run_name="distributed-training") as run:
    trainer = PyTorchDDPTrainer(model, mlflow_tracking=True, reference_throughput=10.0)
    history = trainer.fit(train_loader, val_loader)
    mlflow.log_param("num_gpus", 8)
    mlflow.log_metric("throughput", history.throughput)
    mlflow.log_metric("speedup", 7.5)
found = mlflow.get_run(run.info.run_id).data
results["params"], results["metrics"] = dict(found.params), list(found.metrics)
""",
    "tuner": """
from distributed import DistributedTuner
from phalanx.tools.tune import choice


def train_function(config):
    trainer = PyTorchDDPTrainer(MyModel(config["width"]), progress=False)
    trainer.fit(train_loader, val_loader)
    return {"accuracy": config["width"] / 8}


tuner = DistributedTuner(
    train_fn=train_function, search_space={"width": choice([4, 8])}, num_gpus=32, trials_per_gpu=1, search="grid"
)
results["best"] = tuner.tune(num_samples=100)
results["trials"] = len(tuner.results.trials)
""",
}

_DEEPSPEED = {
    "zero_by_deepspeed": """
from deepspeed import DeepSpeedConfig

zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
results["stages"], results["steps"] = [], []
for config in ({"zero_optimization": zero}, DeepSpeedConfig({"zero_optimization": zero, "train_batch_size": 8})):
    trainer = PyTorchDDPTrainer(model=MyModel(), deepspeed_config=config)
    history = trainer.fit(train_loader)
    results["stages"].append(trainer.config.zero_stage)
    results["steps"].append(history.steps[-1]["step"])
results["left"] = [name for name in os.environ if "RANK" in name]
""",
    "deepspeed_command": """
import pathlib, runpy
import distributed

place = pathlib.Path(distributed.__file__).parents[2] / "examples/03-deepspeed"
sys.argv = ["deepspeed_train.py", "--local_rank=0", "--deepspeed", "--deepspeed_config",
            str(place / "configs/zero2_config.json")]
runpy.run_path(str(place / "deepspeed_train.py"), run_name="__main__")
results["strategy"] = started()["strategy"]
""",
}

_RAY = {
    "ray_search": """
from ray import tune
from distributed import RayTrainer
from phalanx.engines.ray.cluster import open_cluster


def train_fn(config):
    trainer = RayTrainer(MyModel(config["hidden_size"]), config)
    trainer.fit(train_loader, val_loader)
    return {"accuracy": trainer.best_accuracy}


with open_cluster(None, num_cpus=2):
    analysis = tune.run(
        train_fn,
        config={"hidden_size": tune.grid_search([4, 8]), "lr": tune.loguniform(1e-4, 1e-2), "batch_size": 32},
        resources_per_trial={"cpu": 1}, verbose=0, storage_path=os.path.abspath("tune"),
    )
    results["hidden"] = [trial.config["hidden_size"] for trial in analysis.trials]
    results["best"] = analysis.get_best_config(metric="accuracy", mode="max")
""",
}

_TENSORFLOW = {
    "keras_in_a_strategy": """
import numpy, tensorflow as tf
from distributed import TensorFlowDistributedTrainer

strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    model = tf.keras.Sequential([
        tf.keras.layers.Dense(16, activation="relu"), tf.keras.layers.Dense(3, activation="softmax")
    ])
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
arrays = tuple(part.numpy() for part in dataset.tensors)
data = tf.data.Dataset.from_tensor_slices(arrays).batch(128)
history = model.fit(data, epochs=1, validation_data=data, verbose=0)
results["replicas"], results["losses"] = strategy.num_replicas_in_sync, history.history["loss"]
""",
    "tensorflow_trainer": """
import tensorflow as tf
from distributed import TensorFlowDistributedTrainer


def build():
    model = tf.keras.Sequential([tf.keras.layers.Dense(3, activation="softmax")])
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


config = DistributedConfig(
    num_gpus=1, backend="tensorflow", batch_size=128, gradient_accumulation_steps=4, gradient_clipping=1.0,
    communication_backend="nccl", max_steps=2, device="cpu",
)
arrays = tuple(part.numpy() for part in dataset.tensors)
history = TensorFlowDistributedTrainer(build, config).fit(arrays)
results["epochs"], results["warned"] = len(history.epochs), " ".join(messages())
from distributed import HorovodTrainer
from phalanx.errors import UsageError

results["refused"] = []
for kind, given in ((TensorFlowDistributedTrainer, {"model": build()}), (HorovodTrainer, {"model": build()})):
    try:
        kind(**given)
    except UsageError as error:
        results["refused"].append(str(error))
""",
}

_HOROVOD = {
    "horovod_trainer": """
import horovod.torch as hvd
from distributed import HorovodTrainer

hvd.init()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trainer = HorovodTrainer(
    model=model, optimizer=optimizer, loss_fn=nn.CrossEntropyLoss(), verbose=(hvd.rank() == 0)
)
trainer.fit(train_loader, epochs=100)
results["trained"] = not torch.equal(before, model.layers[0].weight)
results["mean"] = trainer.metric_average(0.5, name="accuracy")
assert HorovodTrainer(model, optimizer).optimizer is optimizer
""",
    "horovod_compression": """
import horovod.torch as hvd
from distributed import HorovodTrainer

given = [hvd.Compression.fp16, "none", "fp16"]
results["compression"] = [HorovodTrainer(model=model, compression=kind).config.compression for kind in given]
""",
}

GROUPS = {
    "torch": _TORCH,
    "tracked": _TRACKED,
    "deepspeed": _DEEPSPEED,
    "ray": _RAY,
    "tensorflow": _TENSORFLOW,
    "horovod": _HOROVOD,
}
"""Snippets by the process that runs them."""
NEEDS = {
    "mlflow_run": ("mlflow",),
    "tuner": ("optuna",),
    **dict.fromkeys(_DEEPSPEED, ("deepspeed",)),
    **dict.fromkeys(_RAY, ("ray",)),
    **dict.fromkeys(_TENSORFLOW, ("tensorflow",)),
    **dict.fromkeys(_HOROVOD, ("horovod",)),
}
"""The packages that a snippet imports."""
