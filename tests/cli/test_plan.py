"""`phalanx plan`: the answer in order, JSON, questions, the guide, calibration, learning, and bad input."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib

import pytest
from command import phalanx

from phalanx.cli.plan import parser
from phalanx.config import DistributedConfig
from phalanx.tools.plan.presets import measured_file

LLAMA = ("plan", "llama-70b", "--gpus", 64, "--gpu", "h100")
SMALL = ("plan", "gpt2", "--gpus", 2, "--gpu", "a100-40", "--global-batch", 64)


@pytest.fixture(autouse=True)
def config_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "phalanx"


def test_the_answer_comes_in_order():
    answer = phalanx(*LLAMA, "--tokens", "1T")
    assert answer.code == 0
    assert answer.out.startswith("llama-70b (70.6 B parameters) on 64 x h100 (8 nodes of 8): fits\n")
    parts = (
        "  layout ", "  step ", "MFU ", "  batch ", "  training ", "memory per GPU", "time of a step", "what limits",
        "runners-up of", "refused", "assumed", "sensitivity:", "reliability:", "to train it", "for --config",
    )  # fmt: skip
    places = [answer.out.index(part) for part in parts]
    assert places == sorted(places)
    assert "days" in answer.out
    assert "$" in answer.out
    assert answer.out.isascii(), "not a terminal: no block characters"


def test_the_printed_settings_are_accepted_by_train():
    found = json.loads(phalanx(*LLAMA, "--json").out)
    settings = tomllib.loads(found["toml"])
    DistributedConfig(**settings)
    assert settings == found["settings"]
    assert found["command"].startswith("phalanx submit slurm llama --preset 70b --data ./YOUR_DATA ")
    flags = re.findall(r"--([a-z-]+)", found["command"].replace("\\\n", " "))
    assert {flag.replace("-", "_") for flag in flags} == {"preset", "data", "set", *settings}
    assert not re.search(r"--[a-z-]+ \\\\\n +[^- ]", found["command"]), "a line ends between a flag and its value"


@pytest.mark.parametrize(
    "words",
    [
        "llama-7b --gpus 8 --gpu a100",
        "llama-7b --gpus 1 --gpu a100",
        "llama-70b --gpus 64 --gpu h100 --seq-len 16384 --tokens 1T",
        "gpt3-175b --gpus 512 --gpu h100",
        "mixtral-8x7b --gpus 64 --gpu h100",
        "gpt2 --gpus 2 --gpu rtx4090 --fast --memory --tokens 1B",
        "gpt2-xl --gpus 2 --gpu h100 --precision fp32",
    ],
)
def test_the_printed_command_trains_what_was_planned(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("some words of a text. " * 40_000)
    found = json.loads(phalanx("plan", *words.split(), "--json").out)
    command = shlex.split(found["command"].replace("\\\n", " ").replace("./YOUR_DATA", "./texts"))
    several = found["settings"].get("num_nodes", 1) > 1
    verb = ["phalanx", "submit", "slurm"] if several else ["phalanx", "train"]
    assert command[: len(verb)] == verb
    if several:
        rendered = phalanx(*command[1:], "--render")
        assert f"#SBATCH --nodes={found['settings']['num_nodes']}" in rendered.out
    meeting = ["--rdzv-endpoint", "localhost:29400"] if several else []  # which a job of Slurm finds itself
    answer = phalanx("train", *command[len(verb) :], *meeting, "--dry-run", "--json")
    assert answer.code == 0, answer.text
    run, layout = json.loads(answer.out), found["best"]["layout"]
    assert run["ranks"] == found["cluster"]["gpus"]
    assert run["estimate"]["steps"] == round(found["cost"]["steps"])
    assert run["estimate"]["global_batch"] == found["goal"]["global_batch"]
    assert run["estimate"]["parameters"] == pytest.approx(found["model"]["parameters"], rel=0.01)
    axes = {axis: layout[axis] for axis in ("tp", "pp", "cp", "dp_shard") if layout["ep"] == 1}
    assert {axis: run["mesh"][axis] for axis in axes} == axes
    assert run["strategy"] == found["settings"]["strategy"]
    for name in ("learning_rate", "checkpoint_frequency", "mixed_precision"):
        assert run["settings"][name] == found["settings"][name]


def test_json_is_the_whole_plan():
    found = json.loads(phalanx(*SMALL, "--json", "--what-if", "largest-batch").out)
    assert found["fits"] is True
    assert found["model"]["parameters"] == 124_439_808
    best = found["best"]["estimate"]
    assert sum(best["breakdown"].values()) == pytest.approx(best["step_seconds"])
    assert best["peak_gib"] <= best["memory_limit_gib"]
    assert found["searched"] > 10
    assert found["what_if"][0]["question"] == "largest batch"


def test_nothing_fits_ends_with_2_and_the_smallest_change():
    answer = phalanx("plan", "llama-13b", "--gpus", 1, "--gpu", "t4")
    assert answer.code == 2
    assert "no layout fits" in answer.out
    assert "GPUs instead of 1" in answer.out
    found = json.loads(phalanx("plan", "llama-13b", "--gpus", 1, "--gpu", "t4", "--json").out)
    assert found["fits"] is False
    assert found["smallest_change"]


def test_what_the_command_leaves_open_is_said():
    words = ("plan", "gpt2", "--gpus", 1, "--gpu", "h100")
    out = phalanx(*words).out
    assert "./YOUR_DATA is not planned: " in out
    assert "the recipe gpt compiles on GPUs, which is faster than planned: --compile plans for it" in out
    assert "compiles on GPUs" not in phalanx(*words, "--compile").out
    adapters = phalanx(*words, "--lora-rank", 8).out
    assert "how long it trains is not planned: give --tokens" in adapters
    assert "--set model.pretrained=FOLDER_OR_RUN" in adapters


def test_one_gpu_keeps_states_in_host_memory_where_nothing_else_fits():
    words = ("plan", "llama-7b", "--gpus", 1, "--gpu", "a100")
    answer = phalanx(*words)
    assert answer.code == 0
    assert "one GPU, micro-batch 32, full recomputation, states in host memory" in answer.out
    assert "host memory    100 of 1,152 GiB per node for states" in answer.out
    assert "--strategy fsdp" in answer.out
    assert "--offload cpu" in answer.out
    assert phalanx(*words, "--offload", "none").code == 2


def test_fsdp_shards_all_of_the_model_and_zero_any_part():
    words = (
        "plan",
        "llama-7b",
        "--gpus",
        128,
        "--gpu",
        "a100",
        "--global-batch",
        256,
        "--micro-batch",
        2,
        "--strategy",
    )
    layouts = {
        kind: json.loads(phalanx(*words, *kind.split(), "--json").out)["best"]["layout"]["words"]
        for kind in ("fsdp", "zero", "fsdp --zero-stage 2")
    }
    assert layouts["fsdp"].startswith("FSDP")
    assert layouts["zero"].startswith("ZeRO1 ")
    assert layouts["fsdp --zero-stage 2"].startswith("ZeRO2 ")


def test_the_batch_says_what_was_rounded_and_what_is_implausible():
    assert (
        "[rounded to a multiple of 7; --global-batch sets it]"
        in phalanx("plan", "gpt2", "--gpus", 7, "--gpu", "h100").out
    )
    assert "implausible" not in phalanx(*LLAMA).out
    many = phalanx("plan", "resnet50", "--gpus", 8192, "--gpu", "h100").out
    assert "[implausible: 524,288 samples per step; ResNet-50 on 4,096 TPUs trained with 65,536. Plan for fewer" in many


def test_both_definitions_of_mfu_and_what_the_interval_is():
    out = phalanx("plan", "llama-7b", "--gpus", 8, "--gpu", "a100").out
    assert re.search(r"MFU 65\.\d% \(57\.\d% by 6 x parameters x tokens\), HFU 65\.\d% \(no recomputed operation", out)
    assert "by the errors on 9 in 10 published runs, each left out of the fit]" in out
    assert (
        "left out of the fit; constants of rtx3090 are assumed]"
        in phalanx("plan", "gpt2", "--gpus", 1, "--gpu", "rtx-3090").out
    )


def test_a_batch_smaller_than_the_data_ranks_names_the_nearest_that_works():
    answer = phalanx("plan", "resnet50", "--gpus", 16, "--gpu", "h100", "--global-batch", 4)
    assert answer.code == 2
    assert "  a global batch of 16 instead of 4\n" in answer.out
    assert "GPUs instead of" not in answer.out
    assert "a global batch of 4 cannot be divided by 16 data ranks" in answer.out


def test_deadline_and_budget():
    answer = phalanx(*SMALL, "--tokens", "10B", "--deadline", "1h", "--budget", "1e9")
    assert "of the deadline of 1 h: missed by" in answer.out
    assert "of the budget of $1,000,000,000: kept" in answer.out


def test_fast_and_memory_are_planned_with_the_settings_that_train_reads():
    usual, fast = (json.loads(phalanx(*LLAMA, *more, "--json").out) for more in ((), ("--fast",)))
    assert not {"compile", "optimizer"} & set(usual["settings"])
    assert usual["settings"]["mixed_precision"] == "bf16"
    assert fast["settings"]["mixed_precision"] == "fp8"
    assert fast["settings"]["compile"] is True
    assert fast["best"]["estimate"]["step_seconds"] < 0.9 * usual["best"]["estimate"]["step_seconds"]
    small = ("plan", "llama-13b", "--gpus", 2, "--gpu", "h100", "--json")
    tight = json.loads(phalanx(*small, "--memory").out)
    DistributedConfig(**tight["settings"])
    assert tight["settings"]["optimizer"] == "adamw8bit"
    assert tight["settings"]["activation_checkpointing"] == "budget 0.1"  # 0.3 does not fit
    flags = shlex.split(tight["command"].replace("\\\n", " "))
    assert flags[flags.index("--activation-checkpointing") + 1] == "budget 0.1"
    assert "'budget 0.1'" in tight["command"]  # not cut at the end of a line


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("largest-batch", "data ranks without accumulation"),
        ("longest-sequence", "tokens in the planned layout"),
        ("fewest-gpus", "the fewest that fit, by halves and doubles: 1 GPU"),
        ("sharding", "zero-3: all (fsdp)"),
        ("offload", "offload cpu"),
        ("recompute", "recompute full"),
        ("fp8", "a100-40 has no fp8"),
        ("gpu=h100", "h100"),
    ],
)
def test_what_if(question, words):
    assert words in phalanx(*SMALL, "--what-if", question).out


def test_a_longer_sequence_fits_on_a_larger_gpu():
    lengths = []
    for gpu in ("a100-40", "h200"):
        words = ("plan", "llama-7b", "--gpus", 8, "--gpu", gpu, "--what-if", "longest-sequence", "--json")
        answer = json.loads(phalanx(*words).out)["what_if"][0]["answer"]
        lengths.append(max(int(number.replace(",", "")) for number in re.findall(r"[\d,]{4,}", answer)))
    assert lengths[0] < lengths[1]


def test_the_guide_fits_one_screen_and_is_computed():
    out = phalanx("strategies", "--guide").out
    assert max(map(len, out.splitlines())) <= 130
    assert len(out.splitlines()) <= 40
    for part in ("one copy fit in one GPU?", "Memory efficiency", "Recommended strategy", "ResNet-50, 8 x a100-40"):
        assert part in out
    matrix = out[out.index("Scenario  ") :].splitlines()[1:]
    wanted = (
        "DDP",
        "FSDP full shard (ZeRO-3)",
        "FSDP full shard (ZeRO-3)",
        "FSDP full shard (ZeRO-3) + offload",
        "3D: ",
    )
    for line, strategy in zip(matrix, (*wanted, "FSDP full shard (ZeRO-3) + LoRA"), strict=True):
        assert f"  {strategy}" in line, line
        assert "GiB" in line or "% longer" in line, "the reason has a number"


def test_prices_from_a_file(tmp_path):
    prices = tmp_path / "prices.toml"
    prices.write_text('["p5.48xlarge"]\nprice = 8.0\ndate = "2026-01"\n')
    words = ("plan", "gpt2", "--instance", "p5", "--nodes", 1, "--tokens", "1B", "--json")
    dear = json.loads(phalanx(*words).out)["cost"]["money"]
    cheap = json.loads(phalanx(*words, "--prices", prices).out)["cost"]["money"]
    assert cheap == pytest.approx(dear * 8.0 / 55.04)


def test_a_hugging_face_config(tmp_path):
    values = {"hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8, "vocab_size": 32000}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "intermediate_size": 2816, **values}))
    answer = phalanx("plan", tmp_path, "--gpus", 8, "--gpu", "a100")
    assert answer.code == 0
    assert f"phalanx train --model {tmp_path} --data ./YOUR_DATA" in answer.out.replace(" \\\n   ", "")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **values, "hidden_size": None}))
    answer = phalanx("plan", tmp_path, "--gpus", 8, "--gpu", "a100")
    assert answer.code == 2
    assert "config.json lacks 'hidden_size'" in answer.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("llama-7", "--gpus", 8, "--gpu", "h100"), "unknown model 'llama-7'. Did you mean 'llama-7b'?"),
        (("llama-7b", "--gpus", 8, "--gpu", "h10"), "unknown GPU 'h10'. Did you mean 'h100'?"),
        (("llama-7b", "--instance", "p5.48"), "unknown instance type 'p5.48'. Did you mean 'p5.48xlarge'?"),
        (("llama-7b", "--gpus", 8, "--gpu", "h100", "--inter-node", "efaa"), "Did you mean 'efa'?"),
        (("llama-7b", "--gpus", 0, "--gpu", "h100"), "--gpus 0: must be greater than 0"),
        (("llama-7b", "--gpus", 8 * 10**9, "--gpu", "h100"), "plan for 1,000,000 GPUs or less"),
        (("llama-7b", "--gpus", 8, "--gpu", "h100", "--global-batch", 10**15), "plan for 100,000,000 or less"),
        (("llama-7b", "--gpus", 8, "--gpu", "h100", "--budget", "-5"), "--budget -5: must be greater than 0"),
        (
            ("llama-7b", "--gpus", 8, "--gpu", "h100", "--samples", 9, "--epochs", "nan"),
            "--epochs nan: must be greater",
        ),
        (("llama-7b", "--gpus", 12, "--gpu", "h100"), "12 GPUs are not whole nodes of 8"),
        (("llama-7b",), "--gpus 64 --gpu h100, or --instance"),
        ((), "no model was named"),
        (("llama-7b", "--gpus", 8, "--gpu", "h100", "--instance", "p5"), "both given"),
        (("llama-7b", "--gpus", 8, "--gpu", "h100", "--global-batch", 0), "--global-batch 0: must be 1 or more"),
        (("llama-7b", "--gpus", 8, "--gpu", "h100", "--tokens", "many"), "such as 1T, 300B"),
        (("llama-7b", "--gpus", 8, "--gpu", "h100", "--epochs", 3), "--epochs without --samples"),
        (
            ("llama-7b", "--gpus", 8, "--gpu", "a100", "--fast"),
            "a100-80 has no fp8. It has: bf16, fp16, fp32. GPUs",
        ),
        (
            ("llama-7b", "--gpus", 8, "--gpu", "a100", "--precision", "fp8"),
            "--precision bf16, or plan for another GPU",
        ),
        (("llama-7b", "--gpus", 8, "--gpu", "h100", "--recompute", "budget 2"), "A budget is from 0 to 1"),
        (("llama-7b", "--gpus", 8, "--gpu", "h100", "--recompute", "budget 0.5"), "Write --compile"),
        (("llama-7b", "--gpus", 8, "--gpu", "t4", "--precision", "bf16"), "t4 has no bf16. It has: fp16, fp32"),
        (("llama-7b", "--gpus", 8, "--gpu", "h100", "--strategy", "fsd"), "Did you mean 'fsdp'?"),
        (("llama-7b", "--gpus", 8, "--gpu", "h100", "--what-if", "fewest"), "unknown question 'fewest'"),
        (("llama-7b", "--gpus", 8, "--gpu", "h100", "--max-tensor-parallel", 0), "must be 1 or more"),
        (("llama-7b", "--gpus", 8, "--gpu", "h100", "--deadline", "soon"), "such as 30d, 72h"),
        (("llama-7b", "--gpus", 8, "--gpu", "measured"), "phalanx bench machine"),
        (("torch.nn:Bilinear", "--gpus", 8, "--gpu", "h100"), "torch.nn:Bilinear"),
        (("--calibrate-from", "never"), "never"),
        (("meta-llama/Llama-3-8B", "--gpus", 8, "--gpu", "h100"), "Hugging Face Hub are not fetched"),
        (("meta-llama/Llama-3-8B", "--gpus", 8, "--gpu", "h100"), "or a preset such as llama3-8b."),
        (("my-net/model.py:Net", "--gpus", 8, "--gpu", "h100"), "in the folder my-net: phalanx plan model:Net"),
        (("llama-7b", "--gpus", 8, "--gpu", "h100", "--tokens", "-5B"), "--tokens -5B: expected a number above 0"),
        (("llama-7b", "--gpus", 3.5, "--gpu", "h100"), "--gpus 3.5: expected a whole number"),
        (("llama-7b", "--nodes", 1.5, "--gpu", "h100"), "--nodes 1.5: expected a whole number"),
        (("llama-7b", "--instance", "p5", "--nodes", 2, "--gpus", 8), "2 nodes of p5.48xlarge have 16 GPUs"),
    ],
)
def test_bad_input_is_refused_with_what_to_write(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer = phalanx("plan", *words)
    assert answer.code == 2
    assert message in answer.err
    assert "Traceback" not in answer.text


def test_help_imports_no_torch():
    code = "import sys; from phalanx.cli import main\ntry: main(['plan', '--help'])\n"
    code += "finally: print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.stdout.rstrip().endswith("False")
    assert parser().format_help() in found.stdout


def test_a_plan_imports_no_torch():
    code = "import sys; from phalanx.cli import main; main(['plan', 'gpt2', '--gpus', '2', '--gpu', 't4'])\n"
    found = subprocess.run(
        [sys.executable, "-c", code + "print('torch' in sys.modules)"], capture_output=True, text=True, check=True
    )
    assert found.stdout.rstrip().endswith("False")


def test_calibrate_measures_this_machine_and_runs_teach_the_next_plan(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("phalanx.tools.bench.calibrate._REPEAT_SECONDS", 0.01)
    answer = phalanx("bench", "machine")
    assert answer.code == 0
    assert "matrix products, fp32" in answer.out
    kept = json.loads(measured_file().read_text())
    (name,) = kept["gpus"]
    assert name.endswith("measured:" + name.rpartition(":")[2])
    assert kept["links"][name]["curve"]
    assert phalanx("plan", "gpt2", "--gpus", 2, "--gpu", "measured", "--global-batch", 8).code == 0

    words = ("train", "gpt", "--num-workers", 2, "--device", "cpu", "--max-steps", 12, "--run-dir", "runs/a")
    assert phalanx(*words, "--set", "sample.count=1").code == 0
    first = _predicted()
    assert first["step"]["predicted"] > 0
    with monkeypatch.context() as patched:
        patched.setenv("XDG_CONFIG_HOME", str(tmp_path / "elsewhere"))
        assert _predicted() == {}
        assert "not predicted: CPUs differ, and this one was not measured. Run: phalanx" in phalanx("report", "a").out
    assert phalanx("plan", "--calibrate-from", "a").code == 0
    again = _predicted()
    assert again["step"]["predicted"] == pytest.approx(again["step"]["measured"], rel=0.05)
    assert "[--calibrate-from a, " in phalanx("plan", "gpt2", "--gpus", 2, "--gpu", "measured").out
    assert "measured / predicted" in phalanx("report", "a").out


def _predicted():
    rows = json.loads(phalanx("report", "a", "--json").out)["predicted"]
    return {row["name"]: row for row in rows}


def test_what_is_given_beside_a_mode_wins():
    fast = phalanx("plan", "llama-7b", "--gpus", 8, "--gpu", "a100", "--fast", "--precision", "bf16")
    assert "--mixed-precision bf16" in fast.out
    small = phalanx("plan", "llama-7b", "--gpus", 8, "--gpu", "h100", "--memory", "--recompute", "budget 0.2")
    assert "budget 0.2" in small.out
