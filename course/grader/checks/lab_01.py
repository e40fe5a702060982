"""Lab 01: commands that make a cluster, a loop on Ray Train, metrics of all workers, a run on two nodes with a loss."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from grader.checks.lab_01_cluster import grade_cluster, ready, written
from grader.exercise import Attempt, Exercise, Mistake
from grader.ray_nodes import connect

_TEMPLATE = "module-202/labs/lab-01-ray-train/starter/ray_lab.py"
_BATCHES, _WORKERS = 3, 2
_LIMIT = 240.0


def reference(config: dict[str, Any], *, same_order: bool = False, part: int = 0) -> tuple[list[Tensor], list[float]]:
    """Return weights and the losses of the epochs of one process; part=n: on the rows of worker 0 of n only."""
    torch.manual_seed(config["seed"])
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    draw = torch.Generator().manual_seed(config["seed"])
    inputs = torch.randn(config["rows"], 8, generator=draw).double()
    noise = torch.randn(config["rows"], 1, generator=draw).double()
    targets = inputs.square().sum(dim=1, keepdim=True) + 0.1 * noise
    optimizer = torch.optim.SGD(model.parameters(), lr=config["learning_rate"], momentum=0.9)
    losses = []
    for epoch in range(config["epochs"]):
        seed = config["seed"] + (0 if same_order else epoch)
        order = torch.randperm(config["rows"], generator=torch.Generator().manual_seed(seed))
        total = 0.0
        for batch in order.split(config["batch"]):
            rows = batch[::part] if part else batch
            loss = nn.functional.mse_loss(model(inputs[rows]), targets[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(rows)
        losses.append(total / config["rows"])
    return [parameter.detach() for parameter in model.parameters()], losses


def difference(state: dict[str, Tensor], wanted: list[Tensor]) -> float:
    """Return the largest difference between the weights of a checkpoint and others."""
    gaps = [float((one - other).abs().max()) for one, other in zip(state.values(), wanted, strict=True)]
    return max(math.inf if math.isnan(each) else each for each in gaps)


def make_config(attempt: Attempt, epochs: int) -> dict[str, Any]:
    """Return the settings of a run."""
    batch = 4 * _WORKERS
    return {
        "seed": attempt.seed() % 10**6,
        "rows": _BATCHES * batch,
        "batch": batch,
        "epochs": epochs,
        "learning_rate": 0.01,
    }


def run_loop(module: ModuleType, address: str, config: dict[str, Any], folder: str) -> dict[str, Any]:
    """Run the learner's loop on two workers with a trainer of the grader's."""
    connect(address, module)
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from grader.ray_runs import Collect, Observed, fitted

    trainer = TorchTrainer(
        Observed(module.train_loop, folder),
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=_WORKERS, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name="run", storage_path=folder, callbacks=[Collect(folder)]),
    )
    return fitted(trainer, folder, str(module.__file__))


def grade_train(attempt: Attempt) -> None:
    """Two workers end with the weights of one process, report equally often, and divide the rows."""
    written(attempt, "train_loop")
    nodes = ready(attempt)
    config = make_config(attempt, epochs=3)
    found = attempt.call(run_loop, nodes.address, config, str(attempt.folder), variables=nodes.variables)
    if found["failure"]:
        raise Mistake(found["failure"])
    _check_reports(found["reports"], config)
    first = {rank: notes[1]["gradient"] for rank, notes in found["workers"].items() if len(notes) > 1}
    if len(first) < _WORKERS:
        raise Mistake("a worker made no step with a torch.optim optimizer: every worker trains")
    if max(first.values()) - min(first.values()) > 1e-9:
        raise Mistake(
            "the gradients of the two workers differ at the first step: each trains alone. Wrap the model by"
            " ray.train.torch.prepare_model, and call the wrapped one"
        )
    weights, losses = reference(config)
    _check_weights(found["state"], weights, config)
    for epoch, report in enumerate(found["reports"]):
        rows = [each["rows"] for each in report["metrics"]]
        mean = sum(each["loss"] * each["rows"] for each in report["metrics"]) / sum(rows)
        if not abs(mean - losses[epoch]) <= 1e-9:  # so written, NaN is wrong too
            raise Mistake(
                f"the loss of epoch {epoch} is {mean:.6f} over the rows of all workers, one process has"
                f" {losses[epoch]:.6f}: a worker reports the mean over its own rows of the epoch"
            )


def _check_reports(reports: list[dict[str, Any]], config: dict[str, Any]) -> None:
    if len(reports) != config["epochs"]:
        raise Mistake(f"the workers reported {len(reports)} times in {config['epochs']} epochs: once after each")
    for epoch, report in enumerate(reports):
        for rank, metrics in enumerate(report["metrics"]):
            missing = {"epoch", "loss", "rows", "seconds"} - set(metrics or {})
            if missing:
                raise Mistake(f"the report of worker {rank} has no {', '.join(sorted(missing))}")
        rows = [metrics["rows"] for metrics in report["metrics"]]
        if sum(rows) != config["rows"]:
            raise Mistake(
                f"in epoch {epoch} the workers took {' + '.join(map(str, rows))} rows of {config['rows']}: worker r of"
                " n takes batch[r::n]; its rank and n are in ray.train.get_context()"
            )
        if not report["checkpoint"]:
            raise Mistake(f"no worker gave a checkpoint with the report of epoch {epoch}: rank 0 gives one")


def _check_weights(state: dict[str, Any] | None, weights: list[Tensor], config: dict[str, Any]) -> None:
    if state is None or "files" in state:
        files = "" if state is None else f", its files are {state['files']}"
        raise Mistake(f"the last checkpoint has no file state.pt{files}")
    missing = {"model", "optimizer", "epoch"} - set(state)
    if missing:
        raise Mistake(f"state.pt has no {', '.join(sorted(missing))}: the next step depends on all three")
    if any(name.startswith("module.") for name in state["model"]):
        raise Mistake(
            "the names in the checkpoint begin with 'module.': save the model, not what prepare_model returned"
        )
    gap = difference(state["model"], weights)
    if gap < 1e-9:
        return
    if difference(state["model"], reference(config, same_order=True)[0]) < 1e-9:
        raise Mistake("every epoch has the same order of rows: the seed of its order is config['seed'] + epoch")
    if difference(state["model"], reference(config, part=_WORKERS)[0]) < 1e-9:
        raise Mistake("the weights are those of training on the rows of worker 0 only")
    raise Mistake(
        f"the weights differ from those of one process by {gap:.1e}: compare the order of rows and the optimizer"
    )


def log_lines(module: ModuleType, path: str, reports: list[list[dict[str, Any]]]) -> tuple[bool, str]:
    """Hand reports to the learner's callback; return whether Ray would call it, and what it wrote."""
    from ray.train import UserCallback

    log = module.MetricsLog(path)
    for metrics in reports:
        log.after_report(None, metrics, None)
    return isinstance(log, UserCallback), Path(path).read_text() if Path(path).exists() else ""


def grade_metrics(attempt: Attempt) -> None:
    """One line per report, with the numbers of all workers."""
    written(attempt, "MetricsLog")
    draw = attempt.random
    reports = [
        [
            {
                "epoch": epoch,
                "loss": draw.uniform(0.5, 2),
                "rows": draw.choice((8, 16, 40)),
                "seconds": draw.uniform(1, 3),
            }
            for _ in range(draw.randrange(2, 5))
        ]
        for epoch in range(3)
    ]
    for report in reports:
        report[-1] |= {"seconds": 4.0, "rows": 7}  # neither rank 0 nor a plain mean has the right numbers
    is_callback, text = attempt.call(log_lines, str(attempt.folder / "metrics.jsonl"), reports)
    if not is_callback:
        raise Mistake("MetricsLog is not a ray.train.UserCallback: Ray calls only those that a RunConfig lists")
    try:
        found = [json.loads(line) for line in text.splitlines()]
    except json.JSONDecodeError as error:
        raise Mistake(f"a line of the file is not JSON: {error}") from None
    if len(found) != len(reports):
        raise Mistake(f"the file has {len(found)} lines after {len(reports)} reports: append one for each")
    for line, report in zip(found, reports, strict=True):
        _check_line(line, report)


def _check_line(line: dict[str, Any], report: list[dict[str, Any]]) -> None:
    rows, seconds = sum(each["rows"] for each in report), [each["seconds"] for each in report]
    wanted = {
        "epoch": report[0]["epoch"],
        "workers": len(report),
        "loss": sum(each["loss"] * each["rows"] for each in report) / rows,
        "rows_per_second": rows / max(seconds),
        "slowest": seconds.index(max(seconds)),
    }
    missing = set(wanted) - set(line)
    if missing:
        raise Mistake(f"a line has no {', '.join(sorted(missing))}: {line}")
    reasons = {
        "loss": "each worker's mean counts by its rows",
        "rows_per_second": "the rows of all workers over the seconds of the slowest one, for which all others wait",
        "slowest": "the rank with the most seconds",
    }
    for name, value in wanted.items():
        if not abs(line[name] - value) <= 1e-9:
            about = f": {reasons[name]}" if name in reasons else ""
            raise Mistake(f"epoch {line['epoch']}: {name} is {line[name]} instead of {value}{about}")


def run_trainer(module: ModuleType, address: str, config: dict[str, Any], folder: str, stop: int) -> dict[str, Any]:
    """Fit the learner's trainer; worker 1 is killed before a step."""
    connect(address, module)
    from ray.train.torch import TorchTrainer

    from grader.ray_runs import Collect, Observed, fitted, lines

    module.train_loop = Observed(module.train_loop, folder, stop, after=(stop - 1) // _BATCHES)
    trainer = module.make_trainer(config, _WORKERS, folder)
    if not isinstance(trainer, TorchTrainer):
        raise TypeError(f"make_trainer returned {type(trainer).__name__}, not a ray.train.torch.TorchTrainer")
    trainer.run_config.callbacks = [*(trainer.run_config.callbacks or []), Collect(folder)]
    found = fitted(trainer, folder, str(module.__file__))
    found["metrics"] = lines(Path(folder) / "metrics.jsonl")
    found["kept"] = len([path for path in Path(folder).rglob("checkpoint_*") if path.is_dir()])
    return found


def grade_scale(attempt: Attempt) -> None:
    """Two workers on two nodes; one is killed, and the run ends as if it had not been."""
    written(attempt, "make_trainer", "train_loop", "MetricsLog")
    nodes = ready(attempt)
    config = make_config(attempt, epochs=4)
    stop = 2 * _BATCHES + attempt.random.randrange(2, _BATCHES + 1)
    found = attempt.call(run_trainer, nodes.address, config, str(attempt.folder), stop, variables=nodes.variables)
    workers = found["workers"]
    used = {notes[0]["node"] for name, notes in workers.items() if name.endswith("-0")}
    if len(workers) >= _WORKERS and len(used) < _WORKERS:
        raise Mistake(
            f"the {_WORKERS} workers were on one node, the other one was idle: see placement_strategy of ScalingConfig"
        )
    if found["failure"]:
        if len(workers.get("1-0", [])) <= stop:  # it failed before the grader did anything
            raise Mistake(found["failure"])
        if "1-1" not in workers:
            raise Mistake("worker 1 was killed in epoch 2 and the run ended with it: see FailureConfig")
        raise Mistake(f"after worker 1 was killed and the workers were started again: {found['failure']}")
    if not workers:
        raise Mistake("the trainer does not run train_loop of this file: give it to TorchTrainer as it is")
    again = len(workers.get("0-1", [])) - 1
    if again >= config["epochs"] * _BATCHES:
        raise Mistake(
            f"after worker 1 was killed all {again} steps were computed again: load ray.train.get_checkpoint() and"
            " begin after its epoch"
        )
    state = found["state"]
    if state is None or "model" not in state:
        raise Mistake("the result has no checkpoint with a file state.pt")
    gap = difference(state["model"], reference(config)[0])
    if gap > 1e-9:
        raise Mistake(
            f"after worker 1 was killed in epoch 2 the weights differ from those of a quiet run by {gap:.1e}: are the"
            " optimizer's state and the epoch restored, and is the epoch after it the first?"
        )
    last = found["metrics"][-1]["epoch"] if found["metrics"] else None
    if last != config["epochs"] - 1:
        raise Mistake(f"FOLDER/metrics.jsonl ends with epoch {last}: list MetricsLog in callbacks of RunConfig")
    if found["kept"] > 2:
        raise Mistake(f"{found['kept']} checkpoints were kept instead of 2: see CheckpointConfig")


EXERCISES = (
    Exercise(
        name="lab-01-cluster",
        title="A node joins, and a RayJob on Kubernetes",
        template=_TEMPLATE,
        target="submit_command",
        points=10,
        grade=grade_cluster,
        programs=True,
        limit=_LIMIT,
    ),
    Exercise(
        name="lab-01-train",
        title="A data-parallel loop on Ray Train",
        template=_TEMPLATE,
        target="train_loop",
        points=15,
        grade=grade_train,
        programs=True,
        limit=_LIMIT,
    ),
    Exercise(
        name="lab-01-metrics",
        title="Metrics of all workers",
        template=_TEMPLATE,
        target="MetricsLog",
        points=10,
        grade=grade_metrics,
        programs=True,
        limit=_LIMIT,
    ),
    Exercise(
        name="lab-01-scale",
        title="Two nodes, and a lost worker",
        template=_TEMPLATE,
        target="make_trainer",
        points=15,
        grade=grade_scale,
        programs=True,
        limit=_LIMIT,
    ),
)
