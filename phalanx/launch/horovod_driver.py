"""horovodrun as a child of ours: what it always does, but it never outlives who started it."""

from __future__ import annotations

import os

from phalanx.host.processes import die_with


def bind_to_loopback() -> None:
    """Have Horovod's own servers listen on loopback: they take every interface, also where all ranks are here."""
    from horovod.runner.util import network

    find_port = network.find_port
    network.find_port = lambda make_server: find_port(lambda address: make_server(("127.0.0.1", address[1])))


def main(parent: int, loopback: bool = False) -> None:
    """Run horovodrun with the words that follow; when it is gone, its helpers end their ranks.

    It may become a shell that starts mpirun, which would go on: then the ranks see to their end themselves.
    """
    die_with(parent)
    os.environ.setdefault("PYTHONWARNINGS", "ignore::DeprecationWarning")
    if loopback:
        bind_to_loopback()  # before the modules that take the function from there are imported
    from horovod.runner import launch

    # It would import torch and all of itself in one more process, only to ask what it was built with.
    # Ranks of a build without it say so themselves.
    launch.gloo_built = launch.mpi_built = lambda verbose=False: True
    launch.run_commandline()
