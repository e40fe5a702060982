"""Signed values in the ranks' store.

torch's TCPStore accepts every process that reaches its port, so that any could write its own address there and act as
one of the ranks. Ranks that share a secret (`job_secret`) sign what they write and refuse what is not signed. Counters
are not signed: at worst a run waits for something that never comes.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping
from typing import Any

from torch.distributed import Store

from phalanx.errors import CommunicationError
from phalanx.host.job_secret import VARIABLE

_SIGNATURE = 32


def sign_store(store: Store, environ: Mapping[str, str] = os.environ) -> Store:
    """Return a store that signs and verifies values with the job's secret; the same store where there is none.

    Keep the returned object as long as torch uses it: torch calls its Python methods without owning it.
    """
    secret = environ.get(VARIABLE)
    return SignedStore(store, secret.encode()) if secret else store


def inner_method(name: str) -> Any:
    """Return a method that calls the same method of the store that another one wraps.

    torch calls overrides by name, so a store that wraps another has all of them.
    """

    def method(self: Any, *arguments: Any) -> Any:
        return getattr(self._inner, name)(*arguments)

    return method


class SignedStore(Store):
    """A store whose values carry a signature of key and value."""

    def __init__(self, inner: Store, secret: bytes) -> None:
        super().__init__()
        self._inner: Any = inner  # torch's stubs lack some of its methods
        self._secret = secret

    def set(self, key: str, value: str | bytes) -> None:
        """Write a signed value."""
        self._inner.set(key, self._sealed(key, value))

    def get(self, key: str) -> bytes:
        """Wait for a value, verify it and return it."""
        return self._opened(key, self._inner.get(key))

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        """Write a value where the key holds `expected` ("": nothing); return what it holds now."""
        sealed = self._sealed(key, expected) if expected else ""
        return self._opened(key, self._inner.compare_set(key, sealed, self._sealed(key, value)))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for several values, verify and return them."""
        return [self._opened(key, sealed) for key, sealed in zip(keys, self._inner.multi_get(keys), strict=True)]

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        """Write several signed values."""
        self._inner.multi_set(keys, [self._sealed(key, value) for key, value in zip(keys, values, strict=True)])

    add, check, wait = inner_method("add"), inner_method("check"), inner_method("wait")
    num_keys, set_timeout = inner_method("num_keys"), inner_method("set_timeout")
    delete_key = deleteKey = inner_method("delete_key")
    timeout: Any = property(lambda self: self._inner.timeout)

    def clone(self) -> Store:
        """Return another connection to the same store."""
        return SignedStore(self._inner.clone(), self._secret)

    def _sealed(self, key: str, value: str | bytes) -> bytes:
        plain = value.encode() if isinstance(value, str) else bytes(value)
        return hmac.digest(self._secret, key.encode() + b"\0" + plain, "sha256") + plain

    def _opened(self, key: str, sealed: bytes) -> bytes:
        plain = sealed[_SIGNATURE:]
        if not hmac.compare_digest(sealed, self._sealed(key, plain)):
            raise CommunicationError(
                f"the store holds a value under {key!r} that no rank of this job has signed",
                hint=f"Another process writes to this job's store, or {VARIABLE} differs between the nodes.",
            )
        return plain
