"""DeepSpeed: ZeRO as a strategy, and offload to NVMe."""
