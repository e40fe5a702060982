"""Configuration: one check for arguments, flags, TOML and environment; all mistakes are reported together."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from phalanx import DistributedConfig
from phalanx.cli import main
from phalanx.config import FIELDS, read_settings, resolve, write_toml
from phalanx.config.distributed import RECORD_HEADER, toml_value
from phalanx.errors import ConfigError, UsageError


def test_defaults_are_valid_and_frozen():
    config = DistributedConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.epochs = 3


def test_all_mistakes_are_reported_together_with_the_nearest_name():
    with pytest.raises(ConfigError) as caught:
        DistributedConfig(num_gpu=8, epochs=0, strategy="dpd", mixed_precision="bf17", batch_size="many")
    assert len(caught.value.problems) == 5
    text = str(caught.value)
    for expected in ("'num_gpus'", "epochs = 0: must be 1 or more", "'ddp'", "'bf16'", "batch_size = 'many'"):
        assert expected in text


@pytest.mark.parametrize("ranks", [0, -1])
@pytest.mark.parametrize("name", ["num_workers", "num_gpus", "gpus_per_node", "num_nodes"])
def test_no_ranks_are_refused(name, ranks):
    with pytest.raises(ConfigError, match=f"{name} = {ranks}: must be 1 or more"):
        DistributedConfig(**{name: ranks})


def test_rank_arithmetic_is_checked():
    assert DistributedConfig(num_gpus=8, num_nodes=2, gpus_per_node=4).total_ranks == 8
    assert DistributedConfig(num_nodes=4, gpus_per_node=8).total_ranks == 32
    with pytest.raises(ConfigError, match=r"2 x 3 = 6"):
        DistributedConfig(num_gpus=8, num_nodes=2, gpus_per_node=3)
    with pytest.raises(ConfigError, match="evenly"):
        DistributedConfig(num_workers=5, num_nodes=2)
    with pytest.raises(ConfigError, match="name the same thing"):
        DistributedConfig(num_workers=2, num_gpus=3)
    with pytest.raises(ConfigError, match="below num_nodes"):
        DistributedConfig(num_nodes=2, node_rank=2)


@pytest.mark.parametrize(("stage", "sharding"), [(1, "grad-op"), (2, "grad-op"), (3, "full"), (None, "full")])
def test_a_stage_of_zero_is_a_way_of_sharding(stage, sharding):
    config = DistributedConfig(zero_stage=stage)
    assert config.resolved_sharding == sharding
    assert config.resolved_strategy == ("ddp" if stage is None else "fsdp")
    assert DistributedConfig(strategy="fsdp", zero_stage=stage, sharding=sharding).resolved_sharding == sharding


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("FULL_SHARD", "full"),
        ("SHARD_GRAD_OP", "grad-op"),
        ("HYBRID_SHARD", "hybrid"),
        ("HYBRID_SHARD_ZERO2", "hybrid-grad-op"),
    ],
)
def test_sharding_by_torchs_names(name, ours):
    from torch.distributed.fsdp import ShardingStrategy

    member = next(member for member in ShardingStrategy if member.name.lstrip("_") == name)
    for given in (name, member):
        assert DistributedConfig(strategy="fsdp", sharding=given).resolved_sharding == ours
    resolved = resolve({"strategy": "fsdp", "sharding": name})
    assert (resolved.config.sharding, resolved.origins["sharding"]) == (ours, "argument")


def test_no_shard_is_ddp():
    for strategy in ("auto", "fsdp", "ddp"):
        assert DistributedConfig(strategy=strategy, sharding="NO_SHARD").resolved_strategy == "ddp"
    with pytest.raises(ConfigError, match="sharding = 'NO_SHARD'"):
        DistributedConfig(strategy="ring", sharding="NO_SHARD")


def test_what_contradicts_a_stage_of_zero_is_shown_with_it():
    with pytest.raises(ConfigError, match=r"zero_stage = 2 .*strategy = 'ddp'"):
        DistributedConfig(zero_stage=2, strategy="ddp")
    with pytest.raises(ConfigError, match=r"zero_stage = 1 means sharding = 'grad-op', but sharding = 'full'"):
        DistributedConfig(zero_stage=1, sharding="full")
    with pytest.raises(ConfigError, match=r"zero_stage = 4: not one of"):
        DistributedConfig(zero_stage=4)


@pytest.mark.parametrize(
    ("given", "expected"),
    [(10, (10, "epochs")), ("500 steps", (500, "steps")), ("2epochs", (2, "epochs")), (None, None)],
)
def test_checkpoint_frequency_in_epochs_or_steps(given, expected):
    assert DistributedConfig(checkpoint_frequency=given).checkpoint_every == expected


@pytest.mark.parametrize("given", ["often", 0, "0 steps", "-3"])
def test_bad_checkpoint_frequency(given):
    with pytest.raises(ConfigError, match="checkpoint_frequency"):
        DistributedConfig(checkpoint_frequency=given)


def test_booleans_are_not_numbers():
    with pytest.raises(ConfigError, match="epochs = True"):
        DistributedConfig(epochs=True)


def test_later_sources_win_and_are_named(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('epochs = 3\nbatch_size = 8\n[optimization]\nmixed-precision = "bf16"\n')
    environment = {"PHALANX_BATCH_SIZE": "16", "PHALANX_DEVICE": "cpu", "PHALANX_LOG_DIR": "elsewhere"}
    resolved = resolve(
        {"seed": 5}, given_as="flag", file=file, environ=environment, recipe={"epochs": 9, "seed": 1}, recipe_name="r"
    )
    config, origins = resolved.config, resolved.origins
    assert (config.epochs, config.batch_size, config.seed, config.mixed_precision) == (3, 16, 5, "bf16")
    assert origins["epochs"] == f"file {file}"
    assert origins["batch_size"] == "environment PHALANX_BATCH_SIZE"
    assert origins["seed"] == "flag"
    assert origins["timeout"] == "default"


def test_three_mistakes_in_a_file_are_all_reported(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text('epochs = -2\nbatchsize = 4\ndevice = "gpu"\n')
    assert main(["train", "digits", "--config", str(file)]) == 2
    shown = capsys.readouterr().err
    assert "3 mistakes" in shown
    assert "epochs = -2" in shown
    assert "Did you mean 'batch_size'?" in shown
    assert "device = 'gpu'" in shown
    assert str(file) in shown


@pytest.mark.parametrize(("text", "match"), [("epochs = ", "not valid TOML"), (None, "no such config file")])
def test_unreadable_files(tmp_path, text, match):
    file = tmp_path / "run.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UsageError, match=match):
        read_settings(file)


def test_written_toml_reads_back_equal(tmp_path):
    config = DistributedConfig(epochs=3, name='a "quoted" \\ name', keep_last=None, checkpoint_frequency="5 steps")
    file = tmp_path / "config.toml"
    file.write_text(write_toml(config))
    assert resolve({}, file=file, environ={}).config == config


def test_config_show_names_origins(capsys, monkeypatch):
    monkeypatch.setenv("PHALANX_SEED", "3")
    assert main(["config", "show", "digits", "--gradient-accumulation-steps", "4", "--no-tensorboard"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}
    assert set(FIELDS) == set(lines)
    assert lines["gradient_accumulation_steps"].split() == ["gradient_accumulation_steps", "4", "flag"]
    assert lines["seed"].endswith("environment PHALANX_SEED")
    assert lines["epochs"].endswith("recipe digits")
    assert "False" in lines["tensorboard"]


def test_paths_and_numpy_numbers_are_taken_for_what_they_are():
    config = DistributedConfig(checkpoint_dir=Path("kept") / "here", epochs=np.int64(3), learning_rate=np.float32(0.5))
    assert (config.checkpoint_dir, config.epochs, config.learning_rate) == ("kept/here", 3, 0.5)
    assert type(config.epochs) is int


def test_a_key_in_two_tables_is_a_mistake(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[a]\nepochs = 3\n[b]\nepochs = 5\n")
    with pytest.raises(ConfigError, match="epochs is set twice"):
        read_settings(file)


def test_nothing_to_train_is_a_mistake(capsys):
    assert main(["train"]) == 2
    assert "nothing to train was named" in capsys.readouterr().err


def test_a_recipe_that_a_flag_took_is_explained(capsys):
    assert main(["train", "--tensorboard", "digits"]) == 2
    assert "digits is a value of --tensorboard here. Write: phalanx train digits" in capsys.readouterr().err


def test_help_shows_numbers_to_choose_from(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help", "parallelism"])
    assert "--zero-stage {1,2,3}" in capsys.readouterr().out


def test_replace_checks_again():
    with pytest.raises(ConfigError, match="unknown setting 'epoch'"):
        DistributedConfig().replace(epoch=2)


@pytest.mark.parametrize("place", ["s3://bucket/run", "gs://b", "hdfs://name/x", "file:///tmp/x"])
@pytest.mark.parametrize("name", ["run_dir", "tensorboard"])
def test_a_url_is_not_taken_for_a_folder(name, place):
    with pytest.raises(ConfigError, match=f"{name} = '{place}': files are written to folders"):
        DistributedConfig(**{name: place})
    assert getattr(DistributedConfig(**{name: "runs/s3:x"}), name) == "runs/s3:x"
    assert DistributedConfig(checkpoint_dir=place).checkpoint_dir == place
    with pytest.raises(ConfigError, match=f"checkpoint_dir = '{place}': files are written to folders"):
        DistributedConfig(checkpoint_dir=place, backend="tensorflow")


def test_a_range_of_workers_and_another_smallest_number_contradict(monkeypatch, capsys):
    said = "num_workers = 2:4 begins with 2, but min_workers = 3: leave one out"
    for pair in ("2:4", (2, 4)):
        with pytest.raises(ConfigError, match=said):
            DistributedConfig(num_workers=pair, min_workers=3)
    assert DistributedConfig(num_workers="2:4", min_workers=2).min_workers == 2
    assert main(["train", "digits", "--num-workers", "2:4", "--min-workers", "3", "--dry-run"]) == 2
    assert said in capsys.readouterr().err
    found = resolve({"num_workers": "2:4"}, environ={"PHALANX_MIN_WORKERS": "3"})
    assert found.config.min_workers == 2, "a range takes the place of an earlier source's number"


ALIASES = [
    ({"num_gpus": 4}, {"num_workers": 4, "device": "cuda"}),
    ({"num_nodes": 2, "gpus_per_node": 4}, {"num_nodes": 2, "num_workers": 8, "device": "cuda"}),
    ({"num_gpus": 4, "device": "cpu"}, {"num_workers": 4, "device": "cpu"}),
    ({"mlflow_tracking": True}, {"mlflow": True}),
    ({"mlflow_tracking": True, "mlflow_experiment": "mine"}, {"mlflow": "mine"}),
    ({"tensorboard": True, "tensorboard_dir": "board"}, {"tensorboard": "board"}),
]


@pytest.mark.parametrize(("alias", "meant"), ALIASES)
def test_aliases_mean_the_same_at_every_door(alias, meant, tmp_path, capsys):
    config = DistributedConfig(**meant)
    assert DistributedConfig(**alias) == config
    assert DistributedConfig().replace(**alias) == config
    variables = {f"PHALANX_{name.upper()}": str(value) for name, value in alias.items()}
    assert resolve({}, environ=variables).config == config
    file = tmp_path / "run.toml"
    file.write_text("".join(f"{name} = {toml_value(value)}\n" for name, value in alias.items()))
    resolved = resolve({}, file=file, environ={})
    assert resolved.config == config
    assert {resolved.origins[name] for name in meant} == {f"file {file}"}
    no = {name: "no-" if value is False else "" for name, value in alias.items()}
    words = [f"--{no[n]}{n.replace('_', '-')}" + ("" if isinstance(v, bool) else f"={v}") for n, v in alias.items()]
    assert main(["config", "show", "--json", *words]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {n: shown[n] for n in meant} == {n: {"value": getattr(config, n), "origin": "flag"} for n in meant}


def test_each_part_of_the_console_has_its_own_source():
    given = {"recipe": {"verbosity": "quiet", "console_ranks": "all"}, "environ": {"PHALANX_PROGRESS": "false"}}
    config = resolve({"verbosity": "verbose"}, **given).config
    assert (config.verbosity, config.progress, config.console_ranks) == ("verbose", False, "all")


OF_ENGINES = [
    {"stop_grace": 2.5, "keep_every": 7},
    {"backend": "ray", "placement": "spread"},
    {"backend": "ray", "cpus_per_worker": 0.5, "resources_per_worker": "GPU=0.5,big=1"},
    {"backend": "horovod", "adasum": True, "horovod_timeline": "wire, the second.json"},
]


@pytest.mark.parametrize("given", OF_ENGINES)
def test_a_setting_of_an_engine_is_the_same_at_every_door(given, tmp_path, capsys):
    test_aliases_mean_the_same_at_every_door(given, given, tmp_path, capsys)
    config = DistributedConfig(**given)
    assert {name: config.to_dict()[name] for name in given} == given
    file = tmp_path / "all.toml"
    file.write_text(write_toml(config))
    assert resolve({}, file=file, environ={}).config == config != DistributedConfig()


def test_settings_of_an_engine_in_a_file_are_checked_and_flags_win(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('backend = "ray"\nplacement = "spread"\nresources_per_worker = {GPU = 0.5, big = 1}\n')
    resolved = resolve({"placement": "pack"}, file=file, environ={})
    assert resolved.config.changed("placement", "resources_per_worker") == ["resources_per_worker"]
    assert resolved.config.to_dict()["resources_per_worker"] == "GPU=0.5,big=1"
    assert resolved.origins["resources_per_worker"] == f"file {file}"
    wrong = [
        ({"backend": "ray", "placement": "pact"}, "placement = 'pact': not one of .* Did you mean 'pack'?"),
        ({"backend": "ray", "placment": "pack"}, "unknown setting 'placment'. Did you mean 'placement'?"),
        ({"adasum": True}, "adasum = True with backend = 'pytorch-ddp', which does not follow it: .* 'horovod'"),
        ({"backend": "horovod", "adasum": "maybe"}, "adasum = 'maybe': expected true or false"),
    ]
    for given, said in wrong:
        with pytest.raises(ConfigError, match=said.replace("?", r"\?")):
            DistributedConfig(**given)


def test_a_record_of_a_run_with_options_as_one_text_is_read(tmp_path):
    """Runs of 0.1 wrote the settings of `Advanced` and of engines so."""
    file = tmp_path / "config.toml"
    text = "stop_grace=2.5,timeline=a.json,resources.GPU=0.5,resources.big=1,keep_every=7,decay_norms=false"
    file.write_text(f'{RECORD_HEADER}\nbackend = "ray"\nengine_options = "{text}"\n')
    read = read_settings(file)
    assert read == {
        "backend": "ray",
        "stop_grace": 2.5,
        "horovod_timeline": "a.json",
        "resources_per_worker": "GPU=0.5,big=1",
        "keep_every": 7,
        "decay_norms": False,
    }
    file.write_text(f'{RECORD_HEADER}\nepochs = 2\nengine_options = "none"\n')
    assert read_settings(file) == {"epochs": 2}
    file.write_text('engine_options = "stop_grace=2.5"\n')
    with pytest.raises(ConfigError, match="unknown setting 'engine_options'"):
        resolve({}, file=file, environ={})


def test_an_alias_is_checked_as_a_setting_is():
    with pytest.raises(ConfigError, match="mlflow_tracking = 3: expected true or false"):
        DistributedConfig(mlflow_tracking=3)
    with pytest.raises(
        ConfigError, match=r"mlflow_tracking = 'maybe': expected true or false. \(environment PHALANX_ML"
    ):
        resolve({}, environ={"PHALANX_MLFLOW_TRACKING": "maybe"})


def test_a_copy_with_an_alias_keeps_the_rest():
    config = DistributedConfig(num_workers=2, num_nodes=2, device="cpu")
    copy = config.replace(gpus_per_node=4)
    assert (copy.num_workers, copy.device) == (8, "cpu")
    assert DistributedConfig(num_workers=2).replace(num_gpus=4).device == "cuda"
    with pytest.raises(ConfigError, match="bucket_cap_mb = 0: must be greater than 0"):
        config.replace(bucket_cap_mb=0)


def test_a_tracker_that_is_turned_on_keeps_its_name():
    environ = {"PHALANX_MLFLOW_EXPERIMENT": "mine", "PHALANX_TENSORBOARD_DIR": "board"}
    config = resolve({"mlflow_tracking": True, "tensorboard": True}, environ=environ).config
    assert (config.mlflow, config.tensorboard) == ("mine", "board")


def test_a_later_source_wins_over_an_alias_of_an_earlier_one():
    resolved = resolve({"mlflow": False}, recipe={"mlflow_tracking": True}, environ={"PHALANX_MLFLOW_EXPERIMENT": "x"})
    assert resolved.config.mlflow is False
