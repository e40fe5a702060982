"""`model.pretrained`: a new task on the weights of a folder, a run or a file; what is new and what was left out."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from phalanx.errors import CheckpointError, UsageError
from phalanx.run.weights import save_weights
from phalanx.zoo.models import build, save_pretrained
from phalanx.zoo.pretrained import build_pretrained, pretrained_tokenizer


@pytest.fixture(autouse=True)
def _quiet(monkeypatch, tmp_path):
    """Tensors on the meta device make torch import its compiler, which sets the first variable for good."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # a progress bar would leave its thread behind


@pytest.fixture
def masked():
    torch.manual_seed(1)
    return build("bert", layers=1, hidden=16, heads=2, ffn_hidden=32, vocab_size=50, seq_len=24)


def bodies_are_equal(first, second) -> bool:
    body = [name for name in first.state_dict() if not name.startswith("head")]
    return all(torch.equal(first.state_dict()[name], second.state_dict()[name]) for name in body)


def test_a_folder_of_ours_gets_a_new_head(masked, tmp_path):
    save_pretrained(masked, tmp_path / "hf")
    options = {"task": "qa", "preset": "base", "vocab_size": 1024, "dropout": 0.2, "pretrained": str(tmp_path / "hf")}
    model = build_pretrained("bert", **options)
    assert bodies_are_equal(model, masked)
    assert (model.config.task, model.config.dropout, model.config.vocab_size) == ("qa", 0.2, 50)
    assert model.weights_note.startswith(f"weights of {tmp_path / 'hf'}: 21 tensors; new: head.weight, head.bias; ")
    assert "left out: cls.predictions.bias, " in model.weights_note
    assert "decoder" not in model.weights_note, "a tied tensor is not lost"
    assert model.weights_note.endswith("; it decides on preset, vocab_size")


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "BertModel"])
def test_folders_of_transformers_load_with_and_without_prefix(masked, tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    save_pretrained(masked, tmp_path / "ours")
    theirs = getattr(transformers, kind).from_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    model = build_pretrained("bert", task="classify", classes=3, pretrained=str(tmp_path / "theirs"))
    assert bodies_are_equal(model, masked)
    assert model.head.output.out_features == 3
    pooler = getattr(theirs, "pooler", None)
    if pooler is not None:
        assert torch.equal(model.head.pool.weight, pooler.dense.weight), "a base model has a pooler, and it is kept"
        assert "new: head.output.weight, head.output.bias" in model.weights_note
    else:
        assert "new: head.pool.weight" in model.weights_note


def test_names_of_tensorflow_are_read(masked, tmp_path):
    save_pretrained(masked, tmp_path)
    path = tmp_path / "model.safetensors"
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {}
    for name, tensor in load_file(path).items():
        for new, before in old.items():
            name = name.replace(new, before)
        renamed[name] = tensor
    save_file(renamed, path)
    assert bodies_are_equal(build_pretrained("bert", task="qa", pretrained=str(tmp_path)), masked)


def test_a_file_of_weights_fills_a_model_of_the_given_shape(tmp_path):
    torch.manual_seed(0)
    source = build("convnet", classes=10)
    save_weights(source, tmp_path / "net.safetensors")
    model = build_pretrained("convnet", classes=3, pretrained=str(tmp_path / "net.safetensors"))
    assert "; new: " in model.weights_note
    same = (
        [name for name, value in model.state_dict().items() if torch.equal(value, source.state_dict()[name])]
        if (model.state_dict().keys() == source.state_dict().keys())
        else []
    )
    assert len(same) == len(source.state_dict()) - 2


class TorchvisionBlock(nn.Module):
    """A block of torchvision's ResNet, with its names."""

    def __init__(self, inputs: int, width: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        shapes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        for number, (before, after, kernel, step) in enumerate(
            shapes if bottleneck else [(inputs, width, 3, stride), (width, outputs, 3, 1)], 1
        ):
            setattr(self, f"conv{number}", nn.Conv2d(before, after, kernel, step, padding=kernel // 2, bias=False))
            setattr(self, f"bn{number}", nn.BatchNorm2d(after))
        self.count = number
        if stride > 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, images):
        hidden = images
        for number in range(1, self.count + 1):
            hidden = getattr(self, f"bn{number}")(getattr(self, f"conv{number}")(hidden))
            hidden = hidden.relu() if number < self.count else hidden
        return (hidden + (self.downsample(images) if hasattr(self, "downsample") else images)).relu()


class TorchvisionResNet(nn.Module):
    """torchvision's ResNet, small, with its names."""

    def __init__(self, depths: tuple[int, ...], width: int, classes: int, *, bottleneck: bool) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        inputs = width
        for stage, depth in enumerate(depths):
            blocks = []
            for block in range(depth):
                stride = 2 if stage and not block else 1
                blocks.append(TorchvisionBlock(inputs, width * 2**stage, stride, bottleneck=bottleneck))
                inputs = width * 2**stage * (4 if bottleneck else 1)
            setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
        self.stages = len(depths)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, images):
        hidden = nn.functional.max_pool2d(self.bn1(self.conv1(images)).relu(), 3, 2, 1)
        for stage in range(self.stages):
            hidden = getattr(self, f"layer{stage + 1}")(hidden)
        return self.fc(hidden.mean((2, 3)))


@pytest.mark.parametrize("bottleneck", [False, True])
@torch.no_grad()
def test_weights_of_torchvision_give_the_same_scores(tmp_path, bottleneck):
    torch.manual_seed(0)
    theirs = TorchvisionResNet((2, 1, 2), 8, 5, bottleneck=bottleneck)
    images = torch.randn(4, 3, 64, 64)
    theirs(images)  # running statistics that are not those of the start
    save_file(theirs.state_dict(), tmp_path / "resnet.safetensors")
    shape = {"depths": (2, 1, 2), "width": 8, "channels": 3, "stem": 7, "bottleneck": bottleneck}
    source = str(tmp_path / "resnet.safetensors")
    ours = build_pretrained("resnet", **shape, classes=5, pretrained=source)
    torch.testing.assert_close(ours.eval()(images), theirs.eval()(images))
    assert "new" not in ours.weights_note
    other = build_pretrained("resnet", **shape, classes=3, drop_path=0.1, pretrained=source)
    assert "; new: head.weight, head.bias; left out: head.bias, head.weight" in other.weights_note
    checkpoint = {f"module.{name}": tensor for name, tensor in theirs.state_dict().items()}
    torch.save({"epoch": 3, "state_dict": checkpoint}, tmp_path / "resnet.pth")
    again = build_pretrained("resnet", **shape, classes=5, pretrained=str(tmp_path / "resnet.pth"))
    torch.testing.assert_close(again.eval()(images), theirs(images))


class TimmViT(nn.Module):
    """timm's vision transformer, small, with its names."""

    def __init__(self, size: int, patch: int, hidden: int, heads: int, layers: int, classes: int) -> None:
        super().__init__()
        self.heads = heads
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, hidden, patch, patch)})
        self.cls_token = nn.Parameter(torch.randn(1, 1, hidden))
        self.pos_embed = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, hidden))

        def block() -> nn.ModuleDict:
            attention = nn.ModuleDict({"qkv": nn.Linear(hidden, 3 * hidden), "proj": nn.Linear(hidden, hidden)})
            mlp = nn.ModuleDict({"fc1": nn.Linear(hidden, 2 * hidden), "fc2": nn.Linear(2 * hidden, hidden)})
            norms = {f"norm{number}": nn.LayerNorm(hidden, eps=1e-6) for number in (1, 2)}
            return nn.ModuleDict({**norms, "attn": attention, "mlp": mlp})

        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden, eps=1e-6), nn.Linear(hidden, classes)

    def forward(self, images):
        hidden = self.patch_embed["proj"](images).flatten(2).transpose(1, 2)
        hidden = torch.cat([self.cls_token.expand(len(images), -1, -1), hidden], 1) + self.pos_embed
        for block in self.blocks:
            batch, time, width = hidden.shape
            qkv = block["attn"]["qkv"](block["norm1"](hidden)).reshape(batch, time, 3, self.heads, width // self.heads)
            mixed = nn.functional.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4))
            hidden = hidden + block["attn"]["proj"](mixed.transpose(1, 2).reshape(batch, time, width))
            mlp = block["mlp"]
            hidden = hidden + mlp["fc2"](nn.functional.gelu(mlp["fc1"](block["norm2"](hidden))))
        return self.head(self.norm(hidden)[:, 0])


@torch.no_grad()
def test_a_folder_of_timm_gives_the_same_scores_and_says_how_images_were_normalised(tmp_path):
    torch.manual_seed(0)
    theirs = TimmViT(size=32, patch=8, hidden=24, heads=3, layers=2, classes=5).eval()
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    described = {"architecture": "vit_small_patch8", "pretrained_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3}}
    (tmp_path / "config.json").write_text(json.dumps(described))
    shape = {"patch_size": 8, "channels": 3, "hidden": 24, "heads": 3, "layers": 2, "ffn_hidden": 48, "classes": 5}
    ours = build_pretrained("vit", **shape, image_size=32, pretrained=str(tmp_path)).eval()
    images = torch.randn(4, 3, 32, 32)
    torch.testing.assert_close(ours(images), theirs(images))
    assert "new" not in ours.weights_note
    flags = "--set 'augment.mean=[0.5,0.5,0.5]' --set 'augment.std=[0.5,0.5,0.5]'"
    assert ours.weights_note.endswith(f"its images were normalised by: {flags}")
    larger = build_pretrained("vit", **shape, image_size=48, pretrained=str(tmp_path))
    assert "new" not in larger.weights_note, "positions are interpolated"
    assert torch.equal(larger.embed.positions[:, 0], theirs.pos_embed[:, 0])
    with pytest.raises(CheckpointError, match="it is another model"):
        build_pretrained("vit", preset="tiny", pretrained=str(tmp_path))
    scaled = {"blocks.0.ls1.gamma": torch.ones(24), "blocks.1.ls1.gamma": torch.ones(24)}
    save_file({**theirs.state_dict(), **scaled}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"of another architecture than ViT: .* 'layers.0.ls1.gamma' and 1 more"):
        build_pretrained("vit", **shape, image_size=32, pretrained=str(tmp_path))
    without_label = {**theirs.state_dict(), "pos_embed": theirs.pos_embed[:, 1:].contiguous()}
    save_file(without_label, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="16 positions are not those of a class token and a square of patches"):
        build_pretrained("vit", **shape, image_size=32, pretrained=str(tmp_path))


def test_options_that_a_model_does_not_have_are_refused(masked, tmp_path):
    save_pretrained(masked, tmp_path)
    with pytest.raises(UsageError, match="unknown option 'drop_path' of model 'bert'"):
        build_pretrained("bert", drop_path=0.1, pretrained=str(tmp_path))


def test_wrong_sources_are_named(masked, tmp_path):
    with pytest.raises(UsageError, match="nope': there is nothing at that path"):
        build_pretrained("bert", pretrained=str(tmp_path / "nope"))
    save_pretrained(build("gpt"), tmp_path / "gpt")
    with pytest.raises(UsageError, match="holds a GPT, which is not a 'bert'"):
        build_pretrained("bert", pretrained=str(tmp_path / "gpt"))
    save_weights(masked, tmp_path / "small.safetensors")
    with pytest.raises(CheckpointError, match="it is another model"):
        build_pretrained("bert", preset="debug", pretrained=str(tmp_path / "small.safetensors"))
    (tmp_path / "run").mkdir()
    with pytest.raises(UsageError, match="was not trained from a recipe"):
        build_pretrained("bert", pretrained=str(tmp_path / "run"))


def test_the_tokenizer_of_a_folder_is_found(masked, tmp_path):
    save_pretrained(masked, tmp_path)
    assert pretrained_tokenizer(str(tmp_path)) is None
    (tmp_path / "tokenizer.json").write_text(json.dumps({}))
    assert pretrained_tokenizer(str(tmp_path)) == str(tmp_path)
