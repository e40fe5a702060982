"""Presets of the planner: models, GPUs, links and instance types by name, and the user's own files."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from phalanx.errors import UsageError
from phalanx.tools.plan import presets
from phalanx.tools.plan.cluster import Cluster
from phalanx.zoo.models import registry


@pytest.fixture(autouse=True)
def config_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "phalanx").mkdir()
    return tmp_path / "phalanx"


@pytest.mark.parametrize(("kind", "load"), [("models", "model"), ("gpus", "gpu"), ("links", "link")])
def test_every_entry_loads(kind, load):
    for name in presets.names(kind):
        assert getattr(presets, load)(name).name == presets._plain(kind, name)


def test_every_instance_names_a_known_gpu_and_link_and_has_a_dated_price():
    for name in presets.names("instances"):
        found = presets.instance(name)
        presets.parts_of(presets.of_instances(name, 2))
        assert found.price > 0
        assert found.date
        assert "list price" in found.source


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2-1.5b", 1_557_611_200),
        ("llama-7b", 6_738_415_616),
        ("llama-13b", 13_015_864_320),
        ("llama3-8b", 8_030_261_248),
        ("llama-70b", 70_553_706_496),
        ("llama-405b", 405_853_388_800),
        ("mixtral-8x7b", 46_702_792_704),
        ("vit-l", 304_326_632),
        ("resnet50", 25_557_032),
    ],
)
def test_presets_have_the_published_number_of_parameters(name, count):
    assert presets.model(name).parameters == count


def test_presets_agree_with_the_models_that_train_builds():
    for name in presets.names("models"):
        recipe, preset, _ = presets.train_names(name)
        if recipe is not None:
            assert registry.presets(recipe)[preset].num_parameters() == presets.model(name).parameters, name


def test_the_measured_curve_gives_back_the_measured_times():
    nvlink = presets.link("nvlink4")
    by_size = dict(nvlink.curve)
    measured = {1048576: 27.37, 1073741824: 4029.4}  # bytes to microseconds on 8 GPUs
    for size, microseconds in measured.items():
        seconds = 2 * 7 / 8 * size / (by_size[size] * nvlink.gbps * 1e9)
        assert seconds * 1e6 == pytest.approx(microseconds, rel=1e-3)


@pytest.mark.parametrize(
    ("load", "name", "near"),
    [
        ("model", "llama-7", "llama-7b"),
        ("gpu", "h10", "h100"),
        ("link", "nvlnk4", "nvlink4"),
        ("instance", "p5x", "p5"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(load, name, near):
    with pytest.raises(UsageError, match=f"Did you mean '{near}'"):
        getattr(presets, load)(name)


def test_a_cluster_by_text():
    assert presets.cluster("64xh100").gpus == 64
    machines = presets.cluster("8xp4d.24xlarge")
    assert (machines.gpus, machines.gpus_per_node, machines.gpu) == (64, 8, "a100-40")
    with pytest.raises(UsageError, match="0xh100"):
        presets.cluster("0xh100")
    with pytest.raises(UsageError, match="Did you mean 'h100'"):
        presets.cluster("8xh10")


def test_the_share_of_the_network_per_gpu():
    by_adapters = presets.parts_of(Cluster(gpu="h100", gpus=16, inter_node_gbps=1600))[2]
    assert by_adapters.gbps == pytest.approx(0.95 * 1600 / 8 / 8)
    shared = presets.parts_of(Cluster(gpu="h100", gpus=16, inter_node="ethernet-100"))[2]
    assert shared.gbps == pytest.approx(presets.link("ethernet-100").gbps / 8)
    half = presets.parts_of(Cluster(gpu="h100", gpus=16, oversubscription=2))[2]
    assert half.gbps == pytest.approx(presets.link("infiniband-ndr").gbps / 2)


def test_a_users_file_changes_prices_and_adds_entries(config_home, tmp_path):
    (config_home / "instances.toml").write_text('["p5.48xlarge"]\nprice = 40.0\ndate = "2026-01"\n')
    assert presets.instance("p5").price == 40.0
    assert presets.instance("p5").gpus == 8
    prices = tmp_path / "prices.toml"
    prices.write_text('[mine]\ngpu = "h100"\ngpus = 4\nnetwork_gbps = 200\ninter_node = "roce"\nprice = 8\n')
    assert presets.of_instances("mine", 2, prices).price_per_gpu_hour == 2.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[p5\n", "not a TOML file"),
        ("price = 3\n", "outside a table"),
        ('["p5.48xlarge"]\nprise = 3\n', "Did you mean 'price'"),
        ('["p5.48xlarge"]\nprice = "3"\n', "expected a number"),
        ('["p5.48xlarge"]\nprice = -3\n', "0 or more"),
        ('[mine]\ngpu = "h100"\n', "lacks gpus, network_gbps"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name(tmp_path, text, message):
    prices = tmp_path / "prices.toml"
    prices.write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        presets.instance("mine" if "mine" in text else "p5", prices)
    assert str(prices) in str(caught.value)
    with pytest.raises(UsageError, match="No such file"):
        presets.instance("p5", tmp_path / "absent.toml")


def test_a_measured_gpu_is_found_by_its_short_name(config_home):
    with pytest.raises(UsageError, match="phalanx bench machine"):
        presets.gpu("measured")
    own = {"memory_gib": 8, "tflops": {"fp32": 0.1}, "memory_gbps": 20, "matmul": 1.0, "bandwidth": 1.0}
    own |= {"attention": 0.3, "sms": 2}
    (config_home / "measured.json").write_text(json.dumps({"gpus": {"measured:elsewhere": own}}))
    assert presets.gpu("measured").name == "measured:elsewhere"
    for wrong, words in (("[]", "holds a list"), ("{", "cannot be read")):
        (config_home / "measured.json").write_text(wrong)
        with pytest.raises(UsageError, match=words):
            presets.keep_measured({"gpus": {}})
    with pytest.raises(UsageError, match=r"measured\.json cannot be read"):
        presets.gpu("measured")


def test_presets_work_without_torch():
    code = "import sys; from phalanx.tools.plan.presets import model; model('llama-7b'); print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("device", "memory_gib", "name"),
    [
        ("NVIDIA GeForce RTX 3090", 23.69, "rtx3090"),
        ("NVIDIA GeForce RTX 4090", 23.64, "rtx4090"),
        ("NVIDIA GeForce RTX 5090", 31.36, "rtx5090"),
        ("NVIDIA RTX A6000", 47.54, "a6000"),
        ("NVIDIA L4", 22.03, "l4"),
        ("NVIDIA A10G", 22.06, "a10g"),
        ("NVIDIA GH200 480GB", 94.5, "gh200"),
        ("AMD Instinct MI300X", 191.98, "mi300x"),
        ("NVIDIA RTX 5000 Ada Generation", 31.5, None),
    ],
)
def test_a_driver_name_finds_its_gpu(device, memory_gib, name):
    found = presets.gpu_of_device(device, memory_gib)
    assert (found and found.name) == name
