"""What users of the import name `distributed` write, and the commands of the examples' guide: each runs as it stands.

The snippets run in a few processes, by the engine that they import: each pays for its imports once. A
snippet has a folder and a namespace of its own, and leaves what a test looks at in `results`.
"""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
import uuid
from typing import TYPE_CHECKING, Any

import programs
import pytest
from command import ROOT, Answer, clean_environment, end, finish, write_script
from seed_snippets import GROUPS, NEEDS, PREPARATION, RUNNER

if TYPE_CHECKING:
    from pathlib import Path

EXAMPLES = ROOT / "examples"


def start(*words: object, cwd: Path, **environment: str) -> subprocess.Popen[str]:
    """Start Python with `compat/` on its path, as `pip install ./compat` would have it."""
    return programs.Popen(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env=clean_environment(PYTHONPATH=f"{ROOT / 'compat'}:{ROOT}", PHALANX_DEVICE="cpu", **environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(*words: object, cwd: Path, **environment: str) -> Answer:
    return finish(start(*words, cwd=cwd, **environment))


def installed(name: str) -> bool:
    return all(importlib.util.find_spec(package) is not None for package in NEEDS.get(name, ()))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each snippet left in its `results`, or the error that it ended with."""
    folder = tmp_path_factory.mktemp("seeds")
    (folder / "runner.py").write_text(RUNNER)
    (folder / "preparation.py").write_text(PREPARATION)
    snippets = {group: {name: text for name, text in all.items() if installed(name)} for group, all in GROUPS.items()}
    for group, chosen in snippets.items():
        (folder / f"{group}.json").write_text(json.dumps(chosen))
        # A hundred epochs would take too long here: the environment cuts every run short.
        answer = run("runner.py", f"{group}.json", "preparation.py", cwd=folder, PHALANX_MAX_STEPS="2")
        assert answer.code == 0, f"{group}: {answer.text}"
    return {name: json.loads((folder / f"{name}.json").read_text()) for chosen in snippets.values() for name in chosen}


@pytest.fixture
def outcome(outcomes: dict[str, dict[str, Any]], request: pytest.FixtureRequest) -> dict[str, Any]:
    """The results of the snippet that the test is named after."""
    name = request.node.name.removeprefix("test_")
    if not installed(name):
        pytest.skip(f"{' and '.join(NEEDS[name])} must be installed")
    results = outcomes[name]
    assert "error" not in results, results["error"]
    return results


def test_first_steps(outcome):
    assert outcome == {"ranks": 4, "trained": True}


def test_pytorch_ddp(outcome):
    assert outcome["time"] > 0
    assert 0 <= outcome["accuracy"] <= 1
    assert outcome["checkpoint"]


def test_configuration(outcome):
    for backend, unused in (("pytorch-ddp", []), ("ray", []), ("horovod", ["num_nodes"])):
        assert outcome[backend]["unused"] == unused
        assert (outcome[backend]["num_workers"], outcome[backend]["checkpoint_frequency"]) == (8, 10)
    assert outcome["tensorflow"]["unused"] == [
        "gradient_accumulation_steps", "gradient_clipping", "communication_backend",
    ]  # fmt: skip


def test_mixed_precision(outcome):
    assert outcome["precision"] in ("bf16", "fp32"), "by what is fast on this CPU"


def test_accumulation(outcome):
    assert outcome == {"global_batch": 32 * 8, "ranks": 4}


def test_positional(outcome):
    assert outcome == {"trained": True, "steps": [2, 2], "rate": 0.05}


def test_tensorboard(outcome):
    assert any("tfevents" in name for name in outcome["files"])
    assert {"loss", "learning_rate", "grad_norm"} <= set(outcome["logged"])


def test_profiler(outcome):
    assert outcome["steps"] == 3
    assert "aten::addmm" in outcome["operators"], "one rank trains in this process, so the profiler sees its operators"


def test_rate_scaling(outcome):
    assert outcome["rate"] == pytest.approx(0.002)


def test_warmup(outcome):
    assert outcome["rates"] == pytest.approx([0.01, 0.055])


def test_resume(outcome):
    assert outcome["kept"] == ["step-00000002", "step-00000005"]
    assert sorted(outcome["resumed"], key=str) == [None, "kept/step-00000002"]


def test_sampler(outcome):
    assert any("DistributedSampler replaced" in text for text in outcome["said"])
    assert outcome["steps"] == 2


def test_names(outcome):
    assert outcome == {"others": []}, "each name is phalanx's own"


def test_large_model(outcome):
    assert outcome["strategy"] == "fsdp"


def test_compressed_gradients(outcome):
    assert outcome["sent"] < 0.5 * outcome["plain"]


def test_mlflow_run(outcome):
    assert outcome["params"]["num_gpus"] == "8"
    assert {"throughput", "speedup", "val/loss"} <= set(outcome["metrics"])


def test_tuner(outcome):
    assert outcome == {"best": {"width": 8}, "trials": 2}


def test_zero_by_deepspeed(outcome):
    assert outcome["stages"] == [3, 3]
    assert outcome["steps"] == [2, 2]
    assert outcome["left"] == [], "no launcher started this process, and no variable says so afterwards"


def test_deepspeed_command(outcome):
    assert outcome["strategy"] == "deepspeed"


def test_ray_search(outcome):
    assert outcome["hidden"] in ([4, 8], [8, 4])
    assert outcome["best"]["hidden_size"] in (4, 8)


def test_keras_in_a_strategy(outcome):
    assert outcome["replicas"] == 1
    assert len(outcome["losses"]) == 1


def test_tensorflow_trainer(outcome):
    assert outcome["epochs"] == 1
    assert "gradient_clipping = 1.0" in outcome["warned"]
    keras, horovod = outcome["refused"]
    assert "takes a function that returns a Keras model" in keras
    assert "does not compile against TensorFlow" in horovod


def test_horovod_trainer(outcome):
    assert outcome["trained"]
    assert outcome["mean"] == 0.5


def test_horovod_compression(outcome):
    assert outcome == {"compression": ["fp16", "none", "fp16"]}


# --- commands ---------------------------------------------------------------------------------------------------


def test_the_command_line_trains_a_script_on_four_ranks(tmp_path):
    write_script(
        tmp_path / "train.py",
        """
        from torch import nn, randn, zeros
        from torch.utils.data import TensorDataset
        from distributed import PyTorchDDPTrainer

        trainer = PyTorchDDPTrainer(nn.Linear(4, 1), batch_size=2, max_steps=1)
        trainer.fit(TensorDataset(randn(16, 4), zeros(16, 1)))
        """,
    )
    words = ("--script", "train.py", "--num-gpus", "4", "--backend", "pytorch-ddp")
    answer = run("-m", "distributed.cli", "train", *words, cwd=tmp_path)
    assert answer.code == 0, answer.text
    (events,) = tmp_path.glob("runs/*/events.jsonl")
    started = json.loads(events.read_text().splitlines()[0])
    assert (started["world_size"], started["global_batch"]) == (4, 8)


def test_srun_starts_the_first_example(tmp_path):
    """Two tasks of one step, told of each other as srun does it."""
    job = {"SLURM_JOB_ID": str(uuid.uuid4().int % 10**6), "SLURM_STEP_ID": "0", "SLURM_SRUN_COMM_PORT": "1"}
    step = {**job, "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2"}
    tasks = [{**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    words = (EXAMPLES / "01-ddp-basics/ddp_mnist.py", "--num-epochs", "1")
    answers = finish_all([start(*words, cwd=tmp_path, OMP_NUM_THREADS="1", **task) for task in tasks])
    assert "epoch 1/1 loss" in answers[0].out
    assert answers[1].out == ""


def test_torchs_old_launcher_starts_a_script_on_two_nodes(tmp_path):
    """It adds --local-rank to the script's own arguments; both nodes are here, one rank each."""
    port = free_port()
    own = ("--num-epochs", "1", "--batch-size", "32", "--lr", "0.001", "--checkpoint-dir", tmp_path / "kept")
    nodes = [
        ("--nnodes=2", f"--node_rank={node}", "--master_addr=127.0.0.1", f"--master_port={port}") for node in range(2)
    ]
    script = EXAMPLES / "01-ddp-basics/ddp_training.py"
    answers = finish_all(
        [
            start(
                *("-m", "torch.distributed.launch", "--nproc_per_node=1", *node, script, *own),
                cwd=tmp_path,
                OMP_NUM_THREADS="1",
                PHALANX_MAX_STEPS="2",
                TMPDIR=str(tmp_path),  # its log folder stays behind
            )
            for node in nodes
        ]
    )
    assert "2 ranks on cpu" in answers[0].out


def finish_all(processes: list[subprocess.Popen[str]]) -> list[Answer]:
    """Wait for programs that need each other; all must have ended well."""
    try:
        answers = [finish(process) for process in processes]
    finally:
        for process in processes:
            end(process)
    assert [answer.code for answer in answers] == [0] * len(answers), "\n".join(answer.text for answer in answers)
    return answers


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
