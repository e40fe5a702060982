"""Every wrong input gets a clear message and a non-zero exit, and leaves no process and no partial file."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING

import pytest
from command import files_under, phalanx, write_script

from phalanx.host.gpus import count_gpus

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _in_own_folder(tmp_path, monkeypatch, fork_server):
    monkeypatch.chdir(tmp_path)


def refused(*words: object, code: int = 2) -> str:
    """Run a command that must be refused without a traceback, and return its message."""
    answer = phalanx(*words)
    assert answer.code == code, answer.text
    assert "Traceback" not in answer.text
    assert answer.err.startswith("phalanx: "), answer.text
    return answer.err


def train_script(folder: Path, body: str, *, model: str = "nn.Linear(4, 2)", rest: str = "") -> Path:
    """A script that trains `model` on 12 samples; `body` is the call of the trainer."""
    return write_script(
        folder / "train.py",
        f"""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from phalanx import PyTorchDDPTrainer
{rest}
torch.manual_seed(0)
data = TensorDataset(torch.randn(12, 4), torch.arange(12) % 2)
model = {model}
{body}
""",
    )


# --- names ------------------------------------------------------------------------------------------------------


def test_a_misspelt_flag_is_answered_with_the_right_one():
    message = refused("train", "digits", "--lerning-rate", "0.1")
    assert "unknown flag '--lerning-rate'. Did you mean --learning-rate?" in message


def test_two_unknown_flags_are_both_named():
    message = refused("train", "digits", "--epoch", "3", "--qzx")
    assert "'--epoch'. Did you mean --epochs?" in message
    assert "unknown flag '--qzx'." in message


def test_a_misspelt_recipe_is_answered_with_the_nearest_and_all():
    message = refused("train", "digit")
    assert "unknown recipe 'digit'. Did you mean 'digits'?" in message
    assert "imagefolder" in message


def test_a_script_given_as_recipe_is_refused_with_the_flag_to_use():
    assert "phalanx train --script train.py" in refused("train", "train.py")


@pytest.mark.parametrize(
    ("words", "said", "write"),
    [
        (
            "--lr 0.1 --num-workers 2",
            "unknown flag '--lr'. Did you mean --learning-rate?",
            "--num-workers 2 -- --lr 0.1",
        ),
        ("--batch-sz 3", "unknown flag '--batch-sz'. Did you mean --batch-size?", "-- --batch-sz 3"),
        ("a", "unexpected argument a.", "-- a"),
        ("a b -- c", "unexpected arguments a b.", "-- a b c"),
    ],
)
def test_a_scripts_arguments_without_dashes_are_answered_with_the_command(words, said, write):
    first, rule, command = refused("train", "--script", "main.py", *words.split()).splitlines()
    assert first == f"phalanx: {said}"
    assert rule.strip() == "A script's own arguments go after --:"
    assert command.strip() == f"phalanx train --script main.py {write}"


def test_a_misspelt_command_is_answered_with_the_nearest():
    assert "unknown command 'trian'. Did you mean 'train'?" in refused("trian", "digits")


@pytest.mark.parametrize(
    ("words", "write"),
    [
        ("launch train.py", "phalanx train --script train.py"),
        ("run train.py", "phalanx train --script train.py"),
        ("run", "phalanx train --script FILE"),
        ("sweep digits", "phalanx tune RECIPE --space FILE"),
        ("eval last", "phalanx evaluate last"),
    ],
)
def test_a_command_of_another_program_is_answered_with_ours(words, write):
    assert f"unknown command '{words.split()[0]}'. Write: {write}\n" in refused(*words.split())


@pytest.mark.parametrize(
    ("words", "needs", "example"),
    [
        ("resume", "resume needs RUN", "phalanx resume last"),
        ("runs diff last", "runs diff needs RUN", "phalanx runs diff last digits"),
        ("ckpt cp last", "ckpt cp needs DIR", "phalanx ckpt cp last kept"),
        ("ckpt diff", "ckpt diff needs PATH, PATH", "phalanx ckpt diff last last@best"),
        ("ckpt prune last", "ckpt prune needs --keep-last", "phalanx ckpt prune last --keep-last 4"),
        ("runs note last", "runs note needs TEXT", "phalanx runs note last 'a larger batch'"),
    ],
)
def test_a_missing_argument_is_answered_with_a_whole_command(words, needs, example):
    first, second, *_ = refused(*words.split()).splitlines()
    assert (first, second) == (f"phalanx: {needs}", f"  For example: {example}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train digits --epochs", "--epochs needs a value: --epochs N"),
        ("train digits --set", "--set needs a value: --set KEY=VALUE"),
        ("ui --port abc", "--port abc: expected a whole number"),
        ("tune digits --trials abc", "--trials abc: expected a whole number"),
        ("top --interval x", "--interval x: expected a number"),
        ("config show --toml --changed", "--changed and --toml exclude each other"),
        ("runs list digits", "unexpected argument 'digits'."),
        ("train digits --set modl.x=1", "--set modl.x: unknown table 'modl' of a recipe. Did you mean 'model'?"),
    ],
)
def test_words_of_argparse_are_ours(words, said):
    assert refused(*words.split()).splitlines()[0].startswith(f"phalanx: {said}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--model mpl --data ./rows.csv", "unknown model 'mpl'. Did you mean 'mlp'?"),
        ("--model mlp --data ./row.csv", "there is nothing at that path. Did you mean 'rows.csv'?"),
        ("digits --data digts", "unknown data set 'digts'. Did you mean 'digits'?"),
        ("--script rows.csv", "script 'rows.csv' is not a .py file."),
    ],
)
def test_names_and_files_are_checked_before_ranks_start(tmp_path, words, said):
    (tmp_path / "rows.csv").write_text("a,label\n1,0\n")
    message = refused("train", *words.split())
    assert said in message
    assert "starting" not in message
    assert files_under(tmp_path) == {"rows.csv"}


def test_verify_alone_says_what_to_verify():
    assert "phalanx verify digits" in refused("verify")


def test_an_option_of_the_model_as_a_flag_is_answered_with_set():
    assert "'--dropout'. Write: --set model.dropout=0.3\n" in refused("train", "digits", "--dropout", "0.3")
    assert "'--model.width'. Write: --set model.width=3\n" in refused("train", "digits", "--model.width", "3")
    assert "'--n-layer'. Write: --set model.layers=3\n" in refused("train", "gpt", "--n-layer", "3")
    message = refused("resume", "digits", "--model.width", "3")
    assert "A run keeps its model; a new one takes it: phalanx train RECIPE --set model.width=3" in message


def test_a_recipe_without_its_ending_is_answered_with_the_file(tmp_path):
    (tmp_path / "mine.toml").write_text('model = "mlp"\ndata = "digits"\n')
    assert "Did you mean the file mine.toml?\n  Write: phalanx train mine.toml" in refused("train", "mine")


def test_a_recipe_without_data_is_answered_with_data(tmp_path):
    (tmp_path / "mine.toml").write_text('model = "mlp"\n')
    message = refused("train", "mine.toml")
    assert "does not say which data it has" in message
    assert '[data] with name = "my_package.data:load" (or digits,' in message


def test_a_path_as_name_and_a_range_the_wrong_way_round_are_refused():
    assert "name = '../evil': a name has no '/'" in refused("train", "digits", "--name", "../evil", "--dry-run")
    message = refused("train", "digits", "--num-workers", "4:2", "--dry-run")
    assert "num_workers = 4:2 (min_workers = 4, num_workers = 2): the smaller one comes first." in message


def test_words_after_profile_are_answered_with_what_to_write():
    assert "steps are written steps=10:15" in refused("train", "digits", "--profile", "10:15")
    assert "Did you mean memory?" in refused("train", "digits", "--profile", "steps=2:3", "memroy")
    assert "Write: phalanx train digits ... --profile" in refused("train", "--profile", "steps=2:3", "digits")


def test_a_number_may_be_negative_in_any_form():
    for text in ("-1", "-1e-3", "-.5"):
        assert f"learning_rate = {float(text)}" in refused("train", "digits", "--learning-rate", text)


def test_one_gpu_that_is_missing_is_one(monkeypatch):
    monkeypatch.setattr("phalanx.cli.train.count_gpus", lambda: 0)
    message = refused("train", "digits", "--num-gpus", "1")
    assert "needs 1 GPU on this machine" in message
    assert "run it on the CPU with --device cpu" in message


@pytest.mark.parametrize("tag", ["a/b", "last", " "])
def test_a_tag_that_cannot_be_one_is_refused_before_anything_starts(tmp_path, tag):
    assert "A tag has any characters but '/'" in refused("train", "digits", "--tags", f"good,{tag}")
    assert files_under(tmp_path) == set()


def test_a_recipe_that_reads_files_asks_where_they_are():
    assert "--data" in refused("train", "mnist")


def test_three_mistakes_of_a_file_are_reported_together(tmp_path):
    (tmp_path / "run.toml").write_text('epocs = 3\nlearning_rate = -1\noptimizer = "adamq"\n')
    message = refused("train", "digits", "--config", "run.toml")
    assert "3 mistakes" in message
    assert "unknown setting 'epocs'. Did you mean 'epochs'? (file run.toml)" in message
    assert "learning_rate = -1: must be greater than 0. (file run.toml)" in message
    assert (
        "optimizer = 'adamq': not one of 'adamw', 'adamw8bit', 'adam', 'sgd', 'rmsprop', 'adagrad', 'lars', 'lamb'."
        in message
    )
    assert files_under(tmp_path) == {"run.toml"}


def test_a_file_that_is_missing_or_not_toml_is_named(tmp_path):
    (tmp_path / "run.toml").write_text("epochs = = 3\n")
    assert "run.toml is not valid TOML" in refused("train", "digits", "--config", "run.toml")
    assert "no such config file: absent.toml" in refused("train", "digits", "--config", "absent.toml")


def test_yaml_is_read_and_of_several_files_the_later_one_wins(tmp_path):
    pytest.importorskip("yaml")
    (tmp_path / "a.yaml").write_text("training:\n  epochs: 3\n  learning_rate: 1e-2\ngradient_clipping: null\n")
    (tmp_path / "b.toml").write_text("epochs = 5\n")
    shown = phalanx("config", "show", "--json", "--config", "a.yaml", "--config", "b.toml")
    values = json.loads(shown.out)
    assert values["epochs"] == {"value": 5, "origin": "file b.toml"}
    assert values["learning_rate"] == {"value": 0.01, "origin": "file a.yaml"}
    (tmp_path / "c.yaml").write_text("- epochs\n")
    assert "c.yaml is not valid YAML: expected lines such as" in refused("train", "digits", "--config", "c.yaml")
    (tmp_path / "d.yml").write_text("epochs: [1\n")
    assert "d.yml is not valid YAML" in refused("train", "digits", "--config", "d.yml")


def test_a_recipe_given_as_config_is_answered_with_the_command(tmp_path):
    (tmp_path / "mine.toml").write_text('[data]\nname = "digits"\n[model]\nname = "mlp"\n')
    message = refused("train", "digits", "--config", "mine.toml")
    assert "mine.toml is a recipe" in message
    assert "phalanx train ./mine.toml" in message


def test_an_import_path_given_as_recipe_is_answered_with_the_flags():
    message = refused("train", "my_pkg.Net")
    assert "--model my_pkg:Net" in message
    assert "-m my_pkg.Net" in message


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nope.mod", "there is no module 'nope'"),
        ("json.nope", "the package 'json' has no module 'nope'"),
        ("json", "the package 'json' has no module '__main__'"),
    ],
)
def test_a_module_that_is_not_found_is_refused_before_ranks_start(tmp_path, name, said):
    assert f"{said} (-m {name})" in refused("train", "-m", name)
    assert files_under(tmp_path) == set()


def test_a_stage_of_zero_that_does_not_exist_is_answered_with_those_that_do():
    assert "zero_stage = 4: not one of none, 1, 2, 3." in refused("train", "digits", "--zero-stage", 4)


def test_an_unknown_cluster_is_answered_with_those_that_are_known():
    message = refused("doctor", "--nccl-env", "mars")
    assert "unknown kind of cluster 'mars'" in message
    assert "phalanx doctor --nccl-env ethernet | gcp" in message
    assert "Did you mean 'infiniband'?" in refused("doctor", "--nccl-env", "ib")


def test_a_metric_that_a_recipe_does_not_report_is_refused_before_the_search(tmp_path):
    (tmp_path / "space.toml").write_text("learning_rate = { uniform = [0.1, 0.2] }\n")
    message = refused("tune", "digits", "--space", "space.toml", "--metric", "val/foo")
    assert (
        "'val/foo' of the recipe 'digits'. Did you mean 'val/loss'? Allowed: train/loss, val/accuracy, val/loss."
        in message
    )
    assert files_under(tmp_path) == {"space.toml"}


def test_a_flag_of_another_command_is_named_with_it():
    assert "unknown flag '--dry-run'. phalanx train has it." in refused("tune", "digits", "--dry-run")


@pytest.mark.parametrize(
    "words",
    [
        "mnist --data absent",
        "digits --resume-from-checkpoint absent",
        "digits --resume-from-checkpoint empty",
        "mnist --data file",
        "digits --checkpoint-dir file",
        "digits --run-dir file",
        "digits --tensorboard-dir file/inside",
        "digits --deepspeed-config absent.json",
        "--script absent.py",
        "digits --config absent.toml",
    ],
)
def test_a_wrong_path_is_a_mistake_of_the_command_line(tmp_path, words):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    refused("train", *words.split(), code=2)
    assert files_under(tmp_path) == {"file"}


# --- ranks and devices ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", ["0", "-1"])
def test_no_or_negative_ranks_are_refused(tmp_path, count):
    assert f"num_workers = {count}: must be 1 or more." in refused("train", "digits", "--num-workers", count)
    assert files_under(tmp_path) == set()


def test_more_gpus_than_there_are_says_how_to_run_on_the_cpu(tmp_path):
    many = count_gpus() + 5
    message = refused("train", "digits", "--num-gpus", many)
    assert f"num_workers = {many} on GPUs needs {many} GPUs on this machine" in message
    assert "--device cpu" in message
    assert files_under(tmp_path) == set()


def test_fp16_on_the_cpu_is_refused_with_what_works():
    message = refused("train", "digits", "--device", "cpu", "--mixed-precision", "fp16", "--max-steps", "1")
    assert "'fp16' needs a GPU" in message
    assert "'bf16'" in message


def test_nccl_on_the_cpu_is_refused_with_what_works():
    message = refused("train", "digits", "--device", "cpu", "--communication-backend", "nccl", "--max-steps", "1")
    assert "the ranks compute on the CPU" in message
    assert "'gloo'" in message


def test_mpi_without_mpi_is_refused_with_what_works():
    message = refused("train", "digits", "--device", "cpu", "--communication-backend", "mpi", "--max-steps", "1")
    assert "this torch was built without MPI" in message


# --- scripts ----------------------------------------------------------------------------------------------------


def test_a_script_that_does_not_exist_is_answered_with_its_neighbour(tmp_path):
    write_script(tmp_path / "train.py", "print('hello')")
    message = refused("train", "--script", "trian.py")
    assert "script 'trian.py' does not exist." in message
    assert "Did you mean 'train.py'?" in message


def test_a_script_that_raises_is_reported_with_rank_and_cause(tmp_path):
    script = write_script(
        tmp_path / "train.py", "import os\nif os.environ['RANK'] == '1':\n    raise ValueError('here')\n"
    )
    answer = phalanx("train", "--script", script, "--num-workers", 2, "--device", "cpu")
    assert answer.code == 1
    first_line = answer.err.splitlines()[0]
    assert first_line.startswith("phalanx: rank 1 ")
    assert first_line.endswith("raised ValueError: here")
    assert "train.py" in answer.err


def test_a_script_that_exits_3_makes_the_command_exit_3(tmp_path):
    script = write_script(tmp_path / "train.py", "import sys\nsys.exit(3)\n")
    answer = phalanx("train", "--script", script, "--num-workers", 2, "--device", "cpu")
    assert answer.code == 3
    assert "code 3" in answer.err


def test_a_script_that_hangs_at_start_is_named_with_the_line_it_hangs_in(tmp_path):
    script = write_script(
        tmp_path / "train.py",
        """
        import os, time
        import torch.distributed as dist
        def wait_for_something():
            time.sleep(60)
        if os.environ["RANK"] == "1":
            wait_for_something()
        dist.init_process_group("gloo")
        """,
    )
    answer = phalanx("train", "--script", script, "--num-workers", 2, "--device", "cpu", "--timeout", 1)
    assert answer.code == 1
    assert "rank 1" in answer.err
    assert "wait_for_something" in answer.err


# --- data -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_an_empty_data_set_is_named(tmp_path, workers, kind):
    empty = {"map": "TensorDataset(torch.zeros(0, 4), torch.zeros(0).long())", "stream": "Nothing()"}[kind]
    rest = "class Nothing(torch.utils.data.IterableDataset):\n    def __iter__(self):\n        return iter(())\n"
    script = train_script(tmp_path, f"PyTorchDDPTrainer(model, batch_size=4).fit({empty})", rest=rest)
    message = refused("train", "--script", script, "--num-workers", workers, "--device", "cpu", code=1)
    assert "data set is empty" in message


def test_a_batch_larger_than_the_data_set_is_refused(tmp_path):
    script = train_script(tmp_path, "PyTorchDDPTrainer(model, batch_size=64).fit(data)")
    message = refused("train", "--script", script, "--num-workers", 2, "--device", "cpu", code=1)
    assert "batch_size = 64 is larger than the data set of 12 samples" in message
    assert "Lower batch_size to 6" in message


def test_a_global_batch_larger_than_the_data_set_trains_one_smaller_step_and_says_so(tmp_path):
    script = train_script(tmp_path, "PyTorchDDPTrainer(model, batch_size=8).fit(data)")
    answer = phalanx("train", "--script", script, "--num-workers", 2, "--device", "cpu")
    assert answer.code == 0, answer.text
    assert "the data set has 12 samples, a global batch is 8 x 2 ranks = 16" in answer.text


def test_a_batch_larger_than_the_data_set_is_refused_where_it_would_drop_everything(tmp_path):
    script = train_script(tmp_path, "PyTorchDDPTrainer(model, batch_size=8, drop_last=True).fit(data)")
    message = refused("train", "--script", script, "--num-workers", 2, "--device", "cpu", code=1)
    assert "drop_last=True drops it all" in message
    assert "Lower batch_size to 6" in message


def test_a_schedule_that_needs_an_end_is_refused_for_an_endless_stream(tmp_path):
    rest = """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return ((torch.randn(4), 0) for _ in range(12))
"""
    script = train_script(
        tmp_path, "PyTorchDDPTrainer(model, batch_size=4, lr_schedule='cosine').fit(Stream())", rest=rest
    )
    message = refused("train", "--script", script, "--num-workers", 1, "--device", "cpu")
    assert "lr_schedule = 'cosine' falls towards the last step, but the data has no length" in message
    assert "max_steps" in message


# --- models -----------------------------------------------------------------------------------------------------

_WITH_UNUSED = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.forgotten = nn.Linear(4, 2), nn.Linear(4, 2)
    def forward(self, x):
        return self.used(x)
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_parameters_without_gradient_are_named(tmp_path, workers):
    script = train_script(
        tmp_path, "PyTorchDDPTrainer(model, batch_size=2).fit(data)", model="Model()", rest=_WITH_UNUSED
    )
    message = refused("train", "--script", script, "--num-workers", workers, "--device", "cpu", code=1)
    assert "2 parameters got no gradient " in message
    assert ": forgotten.weight, forgotten.bias" in message
    assert "find_unused_parameters" in message


def test_parameters_without_gradient_train_when_that_is_allowed(tmp_path):
    script = train_script(
        tmp_path, "PyTorchDDPTrainer(model, batch_size=2).fit(data)", model="Model()", rest=_WITH_UNUSED
    )
    answer = phalanx("train", "--script", script, "--num-workers", 2, "--device", "cpu", "--find-unused-parameters")
    assert answer.code == 0, answer.text


def test_a_loss_that_is_not_obvious_is_asked_for(tmp_path):
    script = train_script(tmp_path, "PyTorchDDPTrainer(model, batch_size=2).fit(data)", model="nn.Flatten(0)")
    message = refused("train", "--script", script, "--num-workers", 1, "--device", "cpu")
    assert "Flatten has no trainable parameters" in message
    script = train_script(
        tmp_path,
        "PyTorchDDPTrainer(model, batch_size=2).fit(data)",
        model="nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))",
    )
    message = refused("train", "--script", script, "--num-workers", 2, "--device", "cpu", code=1)
    assert "no loss_fn was given, and none is obvious for an output float32 [2] and a target int64 [2]" in message


# --- checkpoints ------------------------------------------------------------------------------------------------


def test_resuming_without_a_checkpoint_folder_is_refused():
    message = refused("train", "digits", "--resume-from-checkpoint", "--max-steps", "1")
    assert "needs to know where the checkpoints are" in message
    assert "checkpoint_dir" in message


def test_a_checkpoint_directory_that_is_a_file_is_named(tmp_path):
    (tmp_path / "here").write_text("mine")
    message = refused("train", "digits", "--checkpoint-dir", "here", "--max-steps", "1")
    assert "checkpoint_dir = 'here': here is a file, not a folder" in message
    assert (tmp_path / "here").read_text() == "mine"


@pytest.fixture
def read_only(tmp_path):
    """A file system that even root cannot write to."""
    place = tmp_path / "locked"
    place.mkdir()
    if os.geteuid() != 0:
        place.chmod(0o500)
        yield place
        place.chmod(0o700)
        return
    mounted(place, "ro,size=64k")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.fixture
def tiny_disk(tmp_path):
    """A disk with room for 64 kB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    place = tmp_path / "tiny"
    place.mkdir()
    mounted(place, "size=64k")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def mounted(place: Path, options: str) -> None:
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")


def test_a_checkpoint_directory_that_cannot_be_written_is_named_before_training(read_only):
    message = refused("train", "digits", "--checkpoint-dir", read_only, "--max-steps", "1")
    assert f"{read_only} is not writable" in message
    assert "Set checkpoint_dir to a folder you may write to." in message


def test_a_full_disk_is_reported_and_leaves_no_partial_file(tiny_disk):
    message = refused("train", "digits", "--checkpoint-dir", tiny_disk, "--max-steps", "1", code=1)
    assert "No space left on device" in message
    assert "free" in message
    assert "keep_last" in message
    assert list(tiny_disk.iterdir()) == []


def digits_checkpoint(folder: Path, steps: int = 1) -> Path:
    answer = phalanx(
        "train", "digits", "--checkpoint-dir", folder, "--max-steps", steps, "--checkpoint-frequency", "1 steps"
    )
    assert answer.code == 0, answer.text
    return folder / f"step-{steps:08d}"


def truncate(checkpoint: Path) -> None:
    shard = max(checkpoint.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    os.truncate(shard, shard.stat().st_size // 2)


def test_a_truncated_checkpoint_is_passed_over_with_a_warning(tmp_path):
    newest = digits_checkpoint(tmp_path / "ckpt", 2)
    truncate(newest)
    answer = phalanx(
        "train", "digits", "--checkpoint-dir", tmp_path / "ckpt", "--max-steps", 3, "--resume-from-checkpoint"
    )
    assert answer.code == 0, answer.text
    assert f"passed over {newest}" in answer.text
    assert "step 2/3" in answer.text


def test_a_truncated_checkpoint_that_was_named_is_refused(tmp_path):
    newest = digits_checkpoint(tmp_path / "ckpt")
    truncate(newest)
    message = refused("train", "digits", "--resume-from-checkpoint", newest, "--max-steps", 2, code=1)
    assert f"checkpoint {newest} is damaged" in message


def test_a_foreign_checkpoint_is_recognised(tmp_path):
    foreign = tmp_path / "theirs"
    foreign.mkdir()
    (foreign / "config.json").write_text("{}")
    (foreign / "model.safetensors").write_bytes(b"x")
    message = refused("train", "digits", "--resume-from-checkpoint", foreign, "--max-steps", 2, code=1)
    assert "is not a Phalanx checkpoint: it looks like a Hugging Face model directory" in message
    assert files_under(foreign) == {"config.json", "model.safetensors"}


def test_another_models_checkpoint_names_the_first_parameter_that_differs(tmp_path):
    theirs = digits_checkpoint(tmp_path / "ckpt")
    before = files_under(tmp_path / "ckpt")
    script = train_script(
        tmp_path, f"PyTorchDDPTrainer(model, batch_size=4, resume_from_checkpoint={str(theirs)!r}).fit(data)"
    )
    message = refused("train", "--script", script, "--num-workers", 2, "--device", "cpu", code=1)
    assert "the checkpoint belongs to another model: weight is in the model and not in the checkpoint" in message
    assert files_under(tmp_path / "ckpt") == before


def test_a_path_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "runs").write_text("a file")
    assert "runs" in refused("train", "digits", "--device", "cpu", "--epochs", 1)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "loop" in refused("config", "show", "digits", "--config", "loop")
