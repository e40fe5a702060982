"""horovodrun as a child process that ends with the launcher."""

from __future__ import annotations

import os

from phalanx.host.processes import die_with


def bind_to_loopback() -> None:
    """Let Horovod's own servers listen on loopback: by default they listen on every interface."""
    from horovod.runner.util import network

    find_port = network.find_port
    network.find_port = lambda make_server: find_port(lambda address: make_server(("127.0.0.1", address[1])))


def main(parent: int, loopback: bool = False) -> None:
    """Run horovodrun with this process's arguments; when it has ended, its helper processes end their ranks.

    It may replace itself by a shell that starts mpirun, which outlives the launcher: then the ranks end themselves.
    """
    die_with(parent)
    os.environ.setdefault("PYTHONWARNINGS", "ignore::DeprecationWarning")
    if loopback:
        bind_to_loopback()  # before the import of modules that take a reference to the function
    from horovod.runner import launch

    # It would import torch in one more process, only to find out what it was built with. Ranks of a build without it
    # report that themselves.
    launch.gloo_built = launch.mpi_built = lambda verbose=False: True
    launch.run_commandline()
