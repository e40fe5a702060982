"""`PyTorchDDPTrainer`: torch's own processes and process groups, with any strategy."""

from __future__ import annotations

from phalanx.trainers.base import TorchTrainer


class PyTorchDDPTrainer(TorchTrainer):
    """Trains a model on all ranks as if they were one, by torch's DistributedDataParallel or any other strategy.

    Every setting of `DistributedConfig` is an argument (`num_workers=2, batch_size=32, epochs=5, ...`), or give a whole
    `config=`. In a plain Python process `fit` starts the ranks itself and the trained weights are in `model`
    afterwards; in a rank that a launcher started, it joins the others.
    """

    backend = "pytorch-ddp"
