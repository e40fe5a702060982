"""Horovod between the ranks of a grader: the rendezvous that horovodrun has, and the variables that it sets.

horovodrun loads torch in three more processes, which takes ten seconds; the grader's ranks are forked from one that has
it. What a rank calls is the installed Horovod, over gloo on loopback.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from grader.exercise import Missing
from grader.rank import load


def need_horovod() -> None:
    """Raise where Horovod is not installed."""
    if importlib.util.find_spec("horovod") is None:
        raise Missing(
            "Horovod is not installed in this Python, so this exercise cannot be graded here. Build it against your"
            " torch: make horovod, or python tools/build_horovod.py, in the repository of Phalanx"
        )


@contextmanager
def rendezvous(hosts: str) -> Iterator[list[dict[str, str]]]:
    """Open Horovod's rendezvous for hosts such as a:1,b:1; yield the variables of each rank."""
    need_horovod()
    server_module: Any = import_module("horovod.runner.http.http_server")
    plans: Any = import_module("horovod.runner.common.util.hosts")
    gloo_run: Any = import_module("horovod.runner.gloo_run")
    parsed = plans.parse_hosts(hosts)
    plan = plans.get_host_assignments(parsed, sum(host.slots for host in parsed))
    find_port = server_module.find_port
    # By default the server listens on every interface of the machine.
    server_module.find_port = lambda make: find_port(lambda address: make(("127.0.0.1", address[1])))
    server = server_module.RendezvousServer()
    try:
        port = server.start()
    finally:
        server_module.find_port = find_port
    try:
        server.init(plan)
        common = gloo_run.create_run_env_vars("127.0.0.1", ["lo"], port)
        yield [{**common, **gloo_run.create_slot_env_vars(slot)} for slot in plan]
    finally:
        server.stop()


def joined(variables: Mapping[str, Any]) -> Any:
    """Return Horovod's module for torch, initialised as the rank that the variables describe; called in a rank."""
    os.environ.update({name: str(value) for name, value in variables.items()})
    hvd = import_module("horovod.torch")
    hvd.init()
    return hvd


def main(answer: str, folder: str) -> None:
    """Be a rank that horovodrun started: call the learner's hello, and leave what it returned."""
    lines = load(Path(answer)).hello()
    (Path(folder) / f"hello-{os.environ['HOROVOD_RANK']}.json").write_text(json.dumps(lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
