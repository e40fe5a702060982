"""Hosts as network namespaces; a test is skipped where they cannot be made."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from phalanx.errors import UsageError
from phalanx.tools import namespaces
from phalanx.tools.namespaces import HostNamespace

__all__ = ["HostNamespace", "named", "network"]


@contextmanager
def network(count: int) -> Iterator[list[HostNamespace]]:
    """Make some hosts, and remove them afterwards; skip the test where that is not allowed."""
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(namespaces.network(count))
        except UsageError as error:
            pytest.skip(error.message)
        yield hosts


@contextmanager
def named(hosts: list[HostNamespace]) -> Iterator[list[str]]:
    """Give hosts names; as on many systems, each maps its own name to 127.0.1.1, and those of the others rightly."""
    names = [f"machine{number}" for number in range(len(hosts))]
    folders = [Path("/etc/netns") / host.namespace for host in hosts]
    for host, name, folder in zip(hosts, names, folders, strict=True):
        others = [f"{other.address} {one}" for other, one in zip(hosts, names, strict=True) if other is not host]
        folder.mkdir(parents=True)
        own = f"127.0.0.1 localhost\n127.0.1.1 {name} {socket.gethostname()}"
        (folder / "hosts").write_text("\n".join([own, *others, ""]))
    try:
        yield names
    finally:
        for folder in folders:
            shutil.rmtree(folder)
