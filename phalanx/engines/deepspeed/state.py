"""Whole weights and optimizer states, by canonical name, from and to DeepSpeed's flat fp32 partitions."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import nn

from phalanx.errors import CheckpointError, UsageError


class EngineState:
    """The names of a model's and its optimizer's parts, recorded before the engine flattens them."""

    def __init__(self, deepspeed: ModuleType, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._deepspeed = deepspeed
        self._model = model
        self._named = dict(model.named_parameters())
        names = {id(parameter): name for name, parameter in self._named.items()}
        self._groups = [[names[id(p)] for p in group["params"] if id(p) in names] for group in optimizer.param_groups]
        self._dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
        self._marks = {name: set(vars(parameter)) for name, parameter in self._named.items()}
        self._zero: Any = None
        self._stage_3 = False

    @property
    def partitioned(self) -> bool:
        """Whether the engine has partitions; at stage 0 the model and the optimizer have everything."""
        return self._zero is not None

    def connect(self, engine: Any) -> None:
        """Store the engine's optimizer, which has the partitions."""
        zero = engine.optimizer
        if isinstance(zero, torch.optim.Optimizer):
            return
        self._stage_3 = hasattr(zero, "fp32_partitioned_groups_flat")
        if not self._stage_3 and not hasattr(zero, "single_partition_of_fp32_groups"):
            raise UsageError(
                f"DeepSpeed chose {type(zero).__name__} for these settings, whose gradients are not accessible",
                hint="Set zero_stage to 1, 2 or 3, and leave data_types out of the JSON.",
            )
        self._zero = zero

    def weights(self) -> dict[str, torch.Tensor]:
        """Gather all weights, trained ones from their fp32 masters; all ranks must call this."""
        gathered: dict[int, torch.Tensor] = {}
        state = {}
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            if id(tensor) not in gathered:  # tied weights are gathered once
                gathered[id(tensor)] = self._whole(tensor).to(self._dtypes[name]).cpu()
            state[name] = gathered[id(tensor)]
        return state

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, nn.Parameter):
            if tensor.requires_grad:
                master: torch.Tensor = self._deepspeed.utils.safe_get_full_fp32_param(tensor)
                return master.detach().clone()
            with self._deepspeed.zero.GatheredParameters([tensor], enabled=self._stage_3):
                return tensor.detach().clone()
        return tensor.detach().clone()

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Load whole weights into the model and into the fp32 masters."""
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            value = weights[name].to(tensor.device)
            partitioned = self._stage_3 and isinstance(tensor, nn.Parameter)
            with torch.no_grad(), self._deepspeed.zero.GatheredParameters([tensor], 0, enabled=partitioned):
                tensor.data.copy_(value)
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                self._set(tensor, value.float(), None)

    def _set(self, parameter: nn.Parameter, value: torch.Tensor, key: str | None) -> None:
        """Write this rank's part of a whole value into the master (no key), or into an optimizer state."""
        if not self._stage_3:
            parameter.set_full_hp_param(value, key)  # type: ignore[attr-defined]
            return
        part: Any = parameter.ds_tensor  # type: ignore[attr-defined]
        ranks = -(-parameter.ds_numel // part.ds_numel)  # type: ignore[attr-defined]
        padded = value.new_zeros(part.ds_numel * max(ranks, self._zero._get_param_partition_world_size(parameter)))
        padded[: value.numel()] = value.flatten()
        mine = padded.narrow(0, part.ds_numel * self._zero._get_param_partition_rank(parameter), part.ds_numel)
        self._zero.set_local_hp_param(mine, parameter, key)

    def optimizer_state(self) -> dict[str, Any]:
        """Gather the states of all trained parameters; all ranks must call this."""
        optimizer, flats = self._ready_optimizer()
        first = optimizer.state[flats[0]]
        tensors = [key for key, value in first.items() if isinstance(value, torch.Tensor) and value.ndim]
        rest = {key: value for key, value in first.items() if key not in tensors}
        state = {
            name: {**_copied(rest), **{key: self._full_state(self._named[name], key) for key in tensors}}
            for group in self._groups
            for name in group
            if self._named[name].requires_grad
        }
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": names}
            for group, names in zip(optimizer.param_groups, self._groups, strict=True)
        ]
        return {"state": state, "param_groups": groups}

    def _full_state(self, parameter: nn.Parameter, key: str) -> torch.Tensor:
        state: torch.Tensor = self._deepspeed.utils.safe_get_full_optimizer_state(parameter, key)
        return state.detach().cpu().clone()

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Load the states of all trained parameters into the partitions, and the groups' settings."""
        optimizer, flats = self._ready_optimizer()
        loaded: dict[str, Any] = {}
        for name, values in state["state"].items():
            parameter = self._named[name]
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and value.ndim:
                    self._set(parameter, value.to(parameter.device), key)
                else:
                    loaded[key] = value
        for flat in flats:
            optimizer.state[flat].update(_copied(loaded, optimizer.state[flat]))
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})

    def _ready_optimizer(self) -> tuple[torch.optim.Optimizer, list[torch.Tensor]]:
        """Return the optimizer of the partitions and the partitions; initialise its state before the first step."""
        zero = self._zero
        optimizer: torch.optim.Optimizer = zero.optimizer
        flats = zero.fp32_partitioned_groups_flat if self._stage_3 else zero.single_partition_of_fp32_groups
        for number, flat in enumerate(flats):
            if optimizer.state.get(flat):
                continue
            if getattr(zero, "swap_optimizer", False):
                raise CheckpointError(
                    "DeepSpeed's optimizer states on NVMe are made in its first step, and cannot be loaded before it",
                    hint="Resume with offload='cpu'; the checkpoint is the same.",
                )
            group = zero.sub_group_to_group_id[number] if self._stage_3 else number
            _make_state(optimizer, flat, optimizer.param_groups[group])
        if not self._stage_3:
            zero._lazy_init_hp_params_optimizer_state()
        return optimizer, list(flats)

    def restore(self, weights: dict[str, torch.Tensor], device: torch.device) -> None:
        """Restore ordinary parameters, without DeepSpeed's attributes."""
        for name, parameter in self._named.items():
            for mark in set(vars(parameter)) - self._marks[name]:
                delattr(parameter, mark)
            parameter.grad = None
            parameter.data = weights[name].to(device, copy=True)
        for name, buffer in self._model.named_buffers():
            if name in weights:
                buffer.data = weights[name].to(device, copy=True)


def _make_state(optimizer: torch.optim.Optimizer, flat: torch.Tensor, group: dict[str, Any]) -> None:
    """Initialise the optimizer's state for a partition by an empty step, and reset it to zero."""
    groups, gradient = optimizer.param_groups, flat.grad
    flat.grad = torch.zeros_like(flat)
    optimizer.param_groups = [{**group, "params": [flat], "lr": 0.0}]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups, flat.grad = groups, gradient
    for value in optimizer.state[flat].values():
        if isinstance(value, torch.Tensor):
            value.zero_()


def _copied(values: dict[str, Any], like: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return values with tensors copied, to the device of the same key in `like`, else to the CPU."""
    return {
        key: value.clone().to(like[key].device)
        if like and key in like
        else value.cpu().clone()
        if isinstance(value, torch.Tensor)
        else value
        for key, value in values.items()
    }
