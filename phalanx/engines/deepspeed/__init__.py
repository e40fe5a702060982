"""DeepSpeed: ZeRO as a strategy, on ranks that Phalanx or DeepSpeed launches."""

from __future__ import annotations

from phalanx.config import DistributedConfig
from phalanx.config.settings import Settings
from phalanx.engine import Engine


class DeepSpeed(Engine):
    """Checks what offload to NVMe needs; the rest is in the strategy."""

    strategy = "deepspeed"

    def check(self, config: DistributedConfig) -> None:
        """Check the folder and the compiler of `offload="nvme"`."""
        from phalanx.engines.deepspeed.nvme import check_nvme

        check_nvme(config)

    def check_batch(self, config: Settings, data_ranks: int) -> None:
        """Check the JSON's train_batch_size against the ranks."""
        from phalanx.engines.deepspeed.rules import batch_size_for

        batch_size_for(config, data_ranks)

    def notice(self, config: DistributedConfig) -> str | None:
        """Announce a compilation that takes minutes."""
        from phalanx.engines.deepspeed.nvme import slow_start

        return slow_start(config)


ENGINE = DeepSpeed()
