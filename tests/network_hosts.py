"""Hosts as network namespaces; a test is skipped where they cannot be made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from phalanx.errors import UsageError
from phalanx.host import namespaces
from phalanx.host.namespaces import HostNamespace

__all__ = ["HostNamespace", "network"]


@contextmanager
def network(count: int) -> Iterator[list[HostNamespace]]:
    """Make some hosts, and remove them afterwards; skip the test where that is not allowed."""
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(namespaces.network(count))
        except UsageError as error:
            pytest.skip(error.message)
        yield hosts
