"""`HorovodTrainer`: ranks that horovodrun starts, and gradients that Horovod averages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import nn

from phalanx.config import DistributedConfig
from phalanx.engines.horovod.rendezvous import horovod
from phalanx.errors import UsageError
from phalanx.run.trainer import TorchTrainer
from phalanx.world.env import read_rank_env

if TYPE_CHECKING:
    from phalanx.config.arguments import HorovodArguments

_COMPRESSORS = {"NoneCompressor": "none", "FP16Compressor": "fp16"}
"""The config's names of Horovod's classes."""


class HorovodTrainer(TorchTrainer):
    """Trains a model on all ranks as if they were one, with Horovod's all-reduce.

    Works in a rank that horovodrun started, with hvd.init() called before or not, and in a plain script, where `fit`
    starts horovodrun itself (`num_workers=4`, `hosts="node1:8,node2:8"`). Arguments are those of `Trainer`;
    `backward_passes_per_step` is Horovod's name for `gradient_accumulation_steps`; `verbose=False` shows no progress.
    """

    backend = "horovod"
    foreign_models = (
        "Horovod 0.28.1 does not compile against TensorFlow 2.21 (docs/horovod.md), so it trains torch models here. "
        "Keras models on several workers: TensorFlowDistributedTrainer(model_fn=..., num_workers=2)."
    )

    def __init__(
        self,
        model: nn.Module = None,  # type: ignore[assignment]
        config: DistributedConfig | torch.optim.Optimizer | None = None,
        *,
        compression: Any = None,
        backward_passes_per_step: int | None = None,
        verbose: bool | int | None = None,
        **arguments: Unpack[HorovodArguments],
    ) -> None:
        settings: dict[str, Any] = dict(arguments)
        if compression is not None:
            name = _COMPRESSORS.get(getattr(compression, "__name__", ""), repr(compression))
            settings["compression"] = compression if isinstance(compression, str) else name
        if backward_passes_per_step is not None:
            accumulation = settings.setdefault("gradient_accumulation_steps", backward_passes_per_step)
            if accumulation != backward_passes_per_step:
                raise UsageError(
                    f"backward_passes_per_step = {backward_passes_per_step}, "
                    f"but gradient_accumulation_steps = {accumulation}",
                    hint="They are two names of one setting: write one of them.",
                )
        if verbose is not None:
            settings.setdefault("progress", bool(verbose))
        if isinstance(config, DistributedConfig) and config.backend != self.backend:
            settings.setdefault("backend", self.backend)
        super().__init__(model, config, **settings)

    def metric_average(self, value: Any, name: str = "metric") -> float:
        """Return the mean of a value over all ranks; outside of a rank, the value itself."""
        number = torch.as_tensor(value, dtype=torch.float64).detach().cpu()
        if number.numel() != 1:
            raise UsageError(f"metric_average({name!r}) takes one number; got a tensor of shape {tuple(number.shape)}")
        env = read_rank_env()
        if env is None or env.world_size == 1:
            return float(number)
        return float(horovod().allreduce(number.reshape(()), name=f"phalanx.metric.{name}"))
