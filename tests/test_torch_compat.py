"""Every private torch API that Phalanx uses exists in the installed torch and does what Phalanx expects of it."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset, get_worker_info

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import private_torch

from phalanx import torch_compat
from phalanx.comm.backend import PhalanxGroup
from phalanx.comm.compress.hook import FixedBuckets
from phalanx.host.versions import NEWEST_TORCH
from phalanx.loop.sync_norm import SyncedBatchNorm
from phalanx.strategies import tensor_parallel

NEEDS_CUDA = {
    *("end_failed_capture", "flash_cuda", "flash_cuda_backward", "load_nccl"),
    *("record_allocations", "allocations"),
}
OF_THE_COMPILER = ("speed/test_compilation.py", "strategies/test_tensor_overlap.py")
"""The tests that call the functions about torch.compile."""


@pytest.fixture
def group():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=20))
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_no_private_api_is_missing():
    assert private_torch.missing() == {}


def private_names(tree: ast.Module) -> Iterator[str]:
    """Yield the private names by which a file asks torch for something; not those of its own functions."""
    of_file = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [*str(node.module).split("."), *(each.name for each in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for each in node.names for part in each.name.split(".")]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            texts = [each.value for each in node.args if isinstance(each, ast.Constant)]
            if node.func.id in ("getattr", "hasattr", "setattr", "import_module"):
                names = [part for text in texts if isinstance(text, str) for part in text.split(".")]
        yield from (name for name in names if re.match(r"_[a-z]", name) and name not in of_file)


def test_every_private_name_is_listed():
    listed = {part for name in private_torch.PRIVATE for part in re.split("[:.]", name)} | set(private_torch.OF_OBJECTS)
    for path in sorted(Path(torch_compat.__file__).parent.glob("torch_*.py")):
        used = set(private_names(ast.parse(path.read_text())))
        assert used, path.name
        assert used <= listed, f"add to tools/private_torch.py: {sorted(used - listed)} of {path.name}"


def test_private_names_of_modules_are_used_in_these_files_only():
    """`tests/shape` finds `torch._name`; this finds what objects of torch have, whatever they are called."""
    names = sorted({*private_torch.OF_OBJECTS, "_version", "_base", "_is_view", "_schema"} - {"_modules", "_iterator"})
    use = re.compile(rf"(?<!self)(?<!cls)\.({'|'.join(names)})\b")
    package = Path(torch_compat.__file__).parent
    files = [path for path in package.rglob("*.py") if not path.name.startswith("torch_")]
    found = [f"{path.relative_to(package)}: {match[0]}" for path in files for match in use.finditer(path.read_text())]
    assert not found


def test_overridden_private_methods_are_listed():
    listed = {name.rpartition(".")[2] for name in private_torch.PRIVATE}
    classes = [PhalanxGroup, FixedBuckets, SyncedBatchNorm, *vars(tensor_parallel).values()]
    found = {
        method
        for each in classes
        if inspect.isclass(each) and each.__module__.startswith("phalanx")
        for base in each.__mro__[1:]
        if base.__module__.startswith("torch")
        for method in vars(each)
        if re.match(r"_[a-z]", method) and callable(vars(base).get(method))
    }
    assert found <= listed, sorted(found - listed)
    assert {"_allgather_base", "_build_params_for_reducer", "_check_input_dim", "_apply"} <= found


def test_no_private_api_has_changed_since_it_was_looked_at():
    versions = private_torch.read()
    known = versions.get(private_torch.VERSION) or list(versions.values())[-1]
    changed = private_torch.changes(known, private_torch.installed())
    assert not changed, "look at each, then note it with python tools/private_torch.py --write:\n" + "\n".join(changed)


def test_the_newest_torch_that_was_looked_at_is_the_newest_tested():
    assert list(private_torch.read())[-1] == NEWEST_TORCH


def test_every_function_is_called_here_or_in_the_tests_of_the_compiler():
    functions = {
        name
        for name, value in vars(torch_compat).items()
        if inspect.isfunction(inspect.unwrap(value))
        and value.__module__ == torch_compat.__name__
        and not name.startswith("_")
    }
    files = [Path(__file__), *(Path(__file__).parent / name for name in OF_THE_COMPILER)]
    called = {name for path in files for name in re.findall(r"torch_compat\.(\w+)\(", path.read_text())}
    assert functions - called == NEEDS_CUDA


def test_hooks_know_the_backward_pass_and_its_end():
    seen: list[object] = []
    weight = torch.ones(2, requires_grad=True)

    def hook(gradient: torch.Tensor) -> None:
        seen.append(torch_compat.backward_pass_id())
        torch_compat.call_after_backward(lambda: seen.append("end"))

    weight.register_hook(hook)
    weight.sum().backward()
    assert torch_compat.backward_pass_id() == -1
    assert seen[0] >= 0
    assert seen[1] == "end"


def test_new_groups_are_noticed_and_all_are_listed():
    entered: list[str] = []

    def noting(make: Callable[[Any], Any], store: Any, backend: str) -> Any:
        entered.append("begin")
        assert backend == "gloo"
        made = make(store)
        entered.append("end")
        return made

    helper = dist.distributed_c10d._new_process_group_helper
    torch_compat.around_new_groups(noting)
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        assert entered == ["begin", "end"]
        assert len(torch_compat.all_groups()) == 1
        torch_compat.abort_nccl()  # gloo's group stays usable
        dist.all_reduce(torch.ones(1))
    finally:
        dist.distributed_c10d._new_process_group_helper = helper
        dist.destroy_process_group()
    torch_compat.number_groups_from_zero()
    assert dist.distributed_c10d._world.group_count == 0


def test_versions_and_bases_of_tensors():
    tensor = torch.zeros(4)
    before = torch_compat.version_of(tensor)
    tensor.add_(1)
    assert torch_compat.version_of(tensor) == before + 1
    assert torch_compat.base_of(tensor[1:]) is tensor
    assert torch_compat.base_of(tensor) is tensor
    assert torch_compat.is_view(tensor[1:])
    assert not torch_compat.is_view(tensor)


def test_operations_on_many_tensors():
    first, second = [torch.tensor([3.0])], [torch.tensor([4.0])]
    assert torch_compat.foreach_add(first, second)[0].item() == 7
    assert torch_compat.foreach_sub(first, second)[0].item() == -1
    assert torch_compat.foreach_norm(second)[0].item() == 4
    torch_compat.foreach_mul_(first, 2.0)
    torch_compat.foreach_div_(first, 3.0)
    torch_compat.foreach_add_(first, second)
    assert first[0].item() == 6
    torch_compat.foreach_copy_(first, second)
    assert first[0].item() == 4


def test_process_groups(group):
    tensor = torch.ones(3)
    torch_compat.broadcast_coalesced([tensor])
    torch_compat.broadcast_coalesced([tensor], group)
    gathered = torch.empty(3)
    torch_compat.all_gather_flat(gathered, tensor)
    assert gathered.equal(tensor)
    torch_compat.default_store().set("key", "value")
    assert torch_compat.is_alive(group)
    assert torch_compat.finished_work([tensor]).wait()
    assert [0] in torch_compat.group_ranks().values()
    assert isinstance(torch_compat.flight_records(), list)  # empty where TORCH_FR_BUFFER_SIZE was not set
    assert isinstance(torch_compat.unfinished_records("gloo"), list)
    assert isinstance(torch_compat.recorded_progress(), bytes)
    assert torch_compat.group_timeout("gloo", group) == torch_compat.group_timeout("gloo") > 0
    assert torch_compat.group_timeout("nccl") is None
    assert (torch_compat.has_backend("gloo"), torch_compat.has_backend("nccl")) == (True, False)


def test_triton_is_found_where_it_can_be_imported():
    assert torch_compat.has_triton() == (importlib.util.find_spec("triton") is not None)


def test_a_recorded_operation_is_done_once_it_is_completed_or_retired():
    states = [("scheduled", False), ("started", False), ("completed", False), ("started", True)]
    done = [torch_compat.is_done({"state": state, "retired": retired}) for state, retired in states]
    assert done == [False, False, True, True]


def test_waits_for_collectives_are_wrapped_until_that_is_undone(group):
    calls: list[str] = []

    def noting(original):
        def call(*args, **kwargs):
            calls.append(original.__name__)
            return original(*args, **kwargs)

        return call

    undo = torch_compat.around_waits(noting, in_graphs=True)
    try:
        dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.ones(2), async_op=True).wait()
    finally:
        undo()
    assert {"allreduce", "wait"} <= set(calls)
    calls.clear()
    dist.all_reduce(torch.ones(2), async_op=True).wait()
    assert calls == []


def test_a_destroyed_group_is_not_alive(group):
    other = dist.new_group([0])
    dist.destroy_process_group(other)
    assert not torch_compat.is_alive(other)


def test_gloo_inside_a_python_process_group():
    gloo = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=20))
    torch_compat.attach_gloo(dist.ProcessGroup(0, 1), gloo)
    tensor, output = torch.arange(4.0), torch.empty(4)
    torch_compat.gloo_all_gather(gloo, output, tensor).wait()
    assert output.equal(tensor)
    torch_compat.gloo_reduce_scatter(gloo, output.zero_(), tensor, dist.ReduceScatterOptions()).wait()
    assert output.equal(tensor)


def test_buckets_of_ddp_are_rebuilt(group):
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    torch_compat.rebuild_buckets(model.reducer)
    model(torch.ones(1, 2)).sum().backward()
    assert model.module.weight.grad.tolist() == [[1, 1]]


def test_ddp_takes_no_gradients_without_its_hooks(group):
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    torch_compat.remove_ddp_hooks(model)
    model(torch.ones(1, 2)).sum().backward()
    assert torch_compat.ddp_times(model) is None
    torch_compat.remove_ddp_hooks(model)  # again, as its own end does


def test_new_communicators_unbind_the_device_for_the_block(group):
    default = torch.distributed.group.WORLD
    before = default.bound_device_id
    with torch_compat.new_communicators():
        assert default.bound_device_id is None
    assert default.bound_device_id == before


def test_ddp_times_what_its_backward_waits_for(group):
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    assert torch_compat.ddp_times(model) is None
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
    busy, waited = torch_compat.ddp_times(model)
    assert 0 <= waited <= busy < 10


def test_fsdp_drops_what_it_has_not_reduced(group):
    model = fully_shard(nn.Linear(2, 1), mesh=init_device_mesh("cpu", (1,)))
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 2)).sum().backward()
    torch_compat.drop_unreduced(model)
    model.set_requires_gradient_sync(True)
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad.full_tensor().tolist() == [[1.0, 1.0]]


def test_fsdp_shards_frozen_bytes(group):
    torch_compat.let_fsdp_shard_bytes()
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8), requires_grad=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    assert model.weight.full_tensor().tolist() == [[1, 2], [3, 4]]


def test_hosts():
    assert torch_compat.is_own_host("localhost")
    assert not torch_compat.is_own_host("192.0.2.1")


def test_calls_hooks_and_buffers_of_modules():
    model = nn.BatchNorm1d(2)
    torch_compat.set_compiled_call(model, lambda *_: "compiled")
    assert model(torch.ones(2, 2)) == "compiled"
    assert torch_compat.uncompiled_call(model)(torch.ones(2, 2)).shape == (2, 2)
    torch_compat.set_compiled_call(model, None)
    model.register_forward_hook(lambda *_: "hooked")
    assert model(torch.ones(2, 2)) == "hooked"
    torch_compat.forward_hooks(model).clear()
    assert model(torch.ones(2, 2)).shape == (2, 2)
    torch_compat.direct_buffers(model)["running_mean"] = torch.full((2,), 5.0)
    assert model.running_mean.tolist() == [5, 5]
    assert torch_compat.direct_parameters(model)["weight"] is model.weight
    chain = nn.Sequential(model, nn.ReLU())
    torch_compat.direct_modules(chain).pop("0")
    assert len(chain) == 1


def test_kinds_of_modules():
    assert torch_compat.is_batch_norm(nn.SyncBatchNorm(2))
    assert torch_compat.is_dropout(nn.AlphaDropout())
    assert not torch_compat.is_batch_norm(nn.LayerNorm(2))
    assert not torch_compat.is_dropout(nn.ReLU())


def test_optimizers_and_scalers():
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    assert hasattr(optimizer.step, torch_compat.SCHEDULED_MARK)
    torch_compat.note_step(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it warns unless the optimizer has stepped
        scheduler.step()
    chain = torch.optim.lr_scheduler.ChainedScheduler([scheduler])
    assert list(torch_compat.chained_schedulers(chain)) == [scheduler]
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(parameter.sum() * float("inf")).backward()
    scaler.unscale_(optimizer)
    assert [flag.item() for flag in torch_compat.found_inf(scaler, id(optimizer)).values()] == [1.0]
    torch_compat.forget_found_inf(scaler)
    assert torch_compat.found_inf(scaler, id(optimizer)) == {}


class WorkerNumbers(IterableDataset):
    """Yields whether the worker's number is visible before and after it is hidden."""

    def __iter__(self):
        yield get_worker_info() is not None
        torch_compat.hide_worker_info()
        yield get_worker_info() is not None


def test_workers_of_loaders_hide_their_number_and_are_stopped():
    loader = DataLoader(WorkerNumbers(), batch_size=None, num_workers=1, persistent_workers=True)
    assert list(loader) == [True, False]
    (worker,) = loader._iterator._workers
    torch_compat.shutdown_workers(loader)
    assert not worker.is_alive()
    torch_compat.shutdown_workers(None)


def test_batches_stacked_by_another_function():
    samples = [(torch.tensor([n, n]), {"x": float(n)}) for n in range(3)]
    first, named = torch_compat.collate_with(lambda tensors: torch.stack(tensors) + 1, samples)
    assert first.tolist() == [[1, 1], [2, 2], [3, 3]]
    assert named["x"].tolist() == [0.0, 1.0, 2.0]


def test_samplers_that_draw_each_sample_once():
    data = TensorDataset(torch.arange(3))
    assert torch_compat.draws_each_once(RandomSampler(data))
    assert not torch_compat.draws_each_once(RandomSampler(data, replacement=True))
    assert not torch_compat.draws_each_once(RandomSampler(data, num_samples=2))


def test_operators():
    assert torch_compat.argument_names(torch.ops.aten.add.Tensor) == ["self", "other", "alpha"]
    assert torch_compat.functional_collectives().all_reduce


def test_flash_attention_on_cpus():
    query, key, value = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3))
    out, lse = torch_compat.flash_cpu(query.detach(), key.detach(), value.detach(), True)
    expected = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(out, expected.detach())
    expected.sum().backward()
    found = torch_compat.flash_cpu_backward(
        torch.ones_like(out), query.detach(), key.detach(), value.detach(), out, lse, True
    )
    for gradient, tensor in zip(found, (query, key, value), strict=True):
        torch.testing.assert_close(gradient, tensor.grad)


def test_the_cuda_runtime_is_there_where_cuda_is():
    if torch.cuda.is_available():
        assert torch_compat.cuda_runtime().cudaHostRegister
    else:
        with pytest.raises((AssertionError, RuntimeError)):
            torch_compat.cuda_runtime()


def test_the_profiler():
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        experimental_config=torch_compat.profiler_config(all_threads=True),
    ):
        assert torch_compat.profiler_config(all_threads=False)
    assert not torch_compat.is_profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert torch_compat.is_profiling()


def test_fake_tensors_have_no_memory():
    with torch_compat.fake_mode():
        zeros = torch.zeros(1 << 50)
    assert zeros.shape == (1 << 50,)


def test_a_compiled_model_has_its_own_names():
    model = nn.Sequential(nn.Linear(2, 2))
    compiled = torch.compile(model, backend="eager")
    assert torch_compat.uncompiled(compiled) is torch_compat.uncompiled(model) is model
    assert [torch_compat.uncompiled_name(name) for name in compiled.state_dict()] == list(model.state_dict())


@pytest.mark.parametrize("by_rows", [True, False])
def test_scaled_products_multiply_8_bits(by_rows):
    if by_rows and torch_compat.VERSION < (2, 13):
        pytest.skip("on a CPU, torch before 2.13 takes one scale per matrix")
    first, second = torch.randn(32, 64), torch.randn(16, 64)
    scales = [each.abs().amax(1, keepdim=True) / 448 for each in (first, second)]
    if not by_rows:
        scales = [scale.amax() for scale in scales]
    eight = [(each / scale).to(torch.float8_e4m3fn) for each, scale in zip((first, second), scales, strict=True)]
    product = torch_compat.scaled_product(*eight, tuple(scales), torch.bfloat16)
    assert (product.float() - first @ second.t()).abs().max() < 0.1 * (first @ second.t()).abs().max()
