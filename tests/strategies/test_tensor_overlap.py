"""Products of tensor parallelism that overlap with their communication: torch's pass finds them in our layers."""

from __future__ import annotations

import copy
from collections import Counter
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._symmetric_memory import _test_mode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from phalanx import torch_compat
from phalanx.strategies import tensor_overlap
from phalanx.strategies.tensor_overlap import ALLOW_SHARED, Overlap
from phalanx.strategies.tensor_parallel import GatherFirstInput, split_tensors
from phalanx.world.mesh import Mesh
from phalanx.zoo.models.gpt import gpt
from phalanx.zoo.models.llama import llama

SHAPE = {"vocab_size": 64, "seq_len": 16, "hidden": 32, "layers": 1, "heads": 4}
GATHERS, SCATTERS = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
ALONE = ("all_gather_into_tensor", "reduce_scatter_tensor")


@pytest.fixture
def mesh():
    fake_store = import_module("torch.testing._internal.distributed.fake_pg").FakeStore
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    dist.destroy_process_group()
    torch.compiler.reset()


class Passes:
    """A backend of torch.compile: Inductor's passes over a copy of each graph, whose communication it counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.graphs: list[Counter[str]] = []
        monkeypatch.setattr(dist, "is_nccl_available", lambda: True)

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        compile_fx = import_module("torch._inductor.compile_fx").compile_fx
        return compile_fx(graph, inputs, inner_compile=self._count)

    def _count(self, graph: torch.fx.GraphModule, inputs: Any, **_: Any) -> Any:
        passed = copy.deepcopy(graph)
        passes = import_module("torch._inductor.fx_passes.post_grad")
        fake = import_module("torch._guards").detect_fake_mode(inputs)
        with _test_mode(), import_module("torch._inductor.virtualized").V.set_fake_mode(fake):
            passes.view_to_reshape(passed)
            passes.post_grad_passes(passed, is_inference=False)
        names = (str(node.target).split(".")[-2] for node in passed.graph.nodes if "." in str(node.target))
        self.graphs.append(Counter(name for name in names if name in (GATHERS, SCATTERS, *ALONE)))
        return import_module("functorch.compile").make_boxed_func(graph.forward)


def passed_graphs(model: nn.Module, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[Any]:
    """Return what is in the graphs of forward and backward of the only layer, as a run compiles it."""
    passes = Passes(monkeypatch)
    split_tensors(model, mesh, **options)
    undo = torch_compat.overlap_products(mesh.get_group())
    model.layers[0].forward = torch.compile(model.layers[0].forward, backend=passes, dynamic=False)
    tokens = torch.zeros(3, 16, dtype=torch.long)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens, tokens).loss
        loss.backward()
    finally:
        undo()
    return passes.graphs


@pytest.mark.parametrize(
    ("build", "forward", "backward"),
    [
        (gpt, {GATHERS: 2, SCATTERS: 2}, {GATHERS: 2, SCATTERS: 2}),
        # The gradients of several layers with one input are added up, then scattered: after a sum, not a product.
        (llama, {GATHERS: 2, SCATTERS: 2}, {GATHERS: 2, "reduce_scatter_tensor": 2}),
    ],
)
def test_gathers_and_scatters_of_a_layer_are_joined_with_products(mesh, monkeypatch, build, forward, backward):
    assert passed_graphs(build(**SHAPE), mesh, monkeypatch, overlaps=True) == [forward, backward]


def test_biases_within_products_would_prevent_it(mesh, monkeypatch):
    """So that they are added apart only where it is needed, and this is seen when torch no longer needs it."""
    forward = passed_graphs(gpt(**SHAPE), mesh, monkeypatch)[0]
    assert forward == {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}


def test_what_is_gathered_has_the_type_of_the_product(mesh):
    """CUDA's autocast lets norms return float32, the CPU's does not."""
    seen = []
    module = nn.Linear(8, 8)
    parallelize_module(module, mesh, GatherFirstInput())
    module.forward = lambda inputs: seen.append((inputs.dtype, tuple(inputs.shape)))
    with torch.autocast("cpu", torch.bfloat16):
        module(torch.zeros(2, 4, 8))
    module(torch.zeros(2, 4, 8))
    assert seen == [(torch.bfloat16, (2, 8, 8)), (torch.float32, (2, 8, 8))]


def on_gpus(local_rank: int = 0, *, local_size: int = 4, per_gpu: int = 1, tp: int = 2, device: str = "cuda") -> Any:
    """Return what `Overlap` reads of a world: a rank of the first machine."""
    env = SimpleNamespace(local_rank=local_rank, local_world_size=local_size, number_here=local_rank)
    layout = Mesh(dp_shard=4 // tp, tp=tp)
    return SimpleNamespace(env=env, mesh=layout, rank=local_rank, device=torch.device(device), ranks_per_gpu=per_gpu)


@pytest.fixture
def gpus(monkeypatch):
    """Four GPUs that may read each other's memory, apart from the pairs in the returned set."""
    apart: set[tuple[int, int]] = set()
    monkeypatch.delenv(ALLOW_SHARED, raising=False)
    monkeypatch.setattr(torch_compat, "has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one, other) not in apart)
    monkeypatch.setattr(tensor_overlap, "_share_memory", lambda world, group: "")
    return apart


def is_on() -> bool:
    return bool(import_module("torch._inductor.config")._micro_pipeline_tp)


def test_it_is_on_between_begin_and_end(gpus):
    overlap = Overlap()
    assert overlap.begin(on_gpus(), SimpleNamespace(group_name="tp"), splits_sequence=True)
    assert is_on()
    overlap.end()
    assert (is_on(), overlap.note) == (False, "")


@pytest.mark.parametrize(
    ("world", "splits", "expected"),
    [
        (on_gpus(device="cpu"), True, ""),
        (on_gpus(per_gpu=2), True, ""),
        (on_gpus(), False, "the model's plan keeps whole sequences between the layers"),
        (on_gpus(1, local_size=1), True, "its 2 ranks are not on one node"),
        (on_gpus(3, tp=4), True, "GPU 1 cannot read the memory of GPU 3"),
    ],
)
def test_where_it_cannot_be_a_user_of_several_gpus_learns_why(gpus, world, splits, expected):
    gpus.add((1, 3))
    overlap = Overlap()
    assert not overlap.begin(world, SimpleNamespace(group_name="tp"), splits_sequence=splits)
    assert not is_on()
    assert overlap.note.rpartition("communication: ")[2] == expected


def test_ranks_on_one_gpu_overlap_where_torch_was_allowed_to(gpus, monkeypatch):
    monkeypatch.setenv(ALLOW_SHARED, "1")
    overlap = Overlap()
    assert overlap.begin(on_gpus(per_gpu=4), SimpleNamespace(group_name="tp"), splits_sequence=True)
    overlap.end()


def test_memory_that_cannot_be_shared_is_a_reason_on_all_ranks(mesh, monkeypatch):
    def refuse(group: Any) -> None:
        raise RuntimeError("detected allocations from overlapping devices\nand a trace")

    world, group = SimpleNamespace(device=torch.device("cpu")), mesh.get_group()
    monkeypatch.setattr(torch_compat, "share_memory", refuse)
    assert tensor_overlap._share_memory(world, group) == "detected allocations from overlapping devices"
    monkeypatch.setattr(torch_compat, "share_memory", lambda group: None)
    assert tensor_overlap._share_memory(world, group) == ""
    monkeypatch.setattr(dist, "all_reduce", lambda shared, *_, **__: shared.zero_())
    assert "another rank" in tensor_overlap._share_memory(world, group)


def test_a_later_group_of_the_same_name_is_refused(monkeypatch):
    """torch would meet its ranks in the store of the first one, which may have ended."""

    class Group:
        group_name = "of this test"

    calls: list[str] = []
    memory = import_module("torch.distributed._symmetric_memory")
    monkeypatch.setattr(memory, "enable_symm_mem_for_group", calls.append)
    monkeypatch.setattr(memory, "get_symm_mem_workspace", lambda name, min_size: calls.append(name))
    first = Group()
    torch_compat.share_memory(first)
    torch_compat.share_memory(first)
    assert calls == ["of this test"] * 4
    with pytest.raises(RuntimeError, match="used before"):
        torch_compat.share_memory(Group())
