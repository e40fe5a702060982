"""DeepSpeed: ZeRO as a strategy, on ranks of our launcher or DeepSpeed's."""

from __future__ import annotations

from phalanx.config import DistributedConfig
from phalanx.engine import Engine


class DeepSpeed(Engine):
    """Offload to NVMe needs a folder, a compiler and, once, minutes; the rest is the strategy."""

    strategy = "deepspeed"

    def check(self, config: DistributedConfig) -> None:
        """Check the folder and the compiler of `offload="nvme"`."""
        if config.offload == "nvme":
            from phalanx.engines.deepspeed.nvme import check_nvme

            check_nvme(config)

    def notice(self, config: DistributedConfig) -> str | None:
        """Announce a compilation that takes minutes."""
        if config.offload != "nvme":
            return None
        from phalanx.engines.deepspeed.nvme import slow_start

        return slow_start(config)


ENGINE = DeepSpeed()
