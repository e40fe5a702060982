"""Lab 02, task 1: start Horovod on several hosts, and let each rank say where it is.

Start it with `python launch.py localhost:1 127.0.0.1:1`: two names of this machine stand for two hosts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

import horovod.torch as hvd


def horovodrun_words(hosts: Mapping[str, int], program: Sequence[str], interface: str) -> list[str]:
    """Return the command line that starts a program on every slot of every host.

    hosts: the name of each host with its number of slots, in the order of the ranks. program: the words of the command
    that each rank runs. interface: the network card that all hosts have in common, such as eth0; on one machine lo.
    Ranks talk by gloo, and horovodrun's own check of the hosts is not taken from its cache.
    """
    # TODO horovod-hosts: write the command line, and hello below.
    #   Hints, one at a time: phalanx learn hint horovod-hosts
    raise NotImplementedError("horovodrun_words")


def hello() -> list[str]:
    """Join the other ranks and return one line per rank, in the order of ranks, the same list on all of them.

    A line is: rank 3 of 4: number 1 of 2 on host 1 of 2 (node-b). The name of the host is in HOROVOD_HOSTNAME.
    """
    # Second half of task 1: every rank knows its own place; an object of each rank can be gathered on all of them.
    raise NotImplementedError("hello")


def main() -> int:
    """Start the ranks, or be one of them."""
    if "HOROVOD_RANK" in os.environ:
        lines = hello()
        if hvd.rank() == 0:
            print("\n".join(lines), flush=True)
        return 0
    hosts = {name: int(slots) for name, _, slots in (word.partition(":") for word in sys.argv[1:])}
    words = horovodrun_words(hosts, [sys.executable, os.path.abspath(__file__)], "lo")
    print(" ".join(words), flush=True)
    return subprocess.call(words)


if __name__ == "__main__":
    sys.exit(main())
