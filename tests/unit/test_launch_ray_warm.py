"""A local Ray's warm process and the script that asks it for workers: whom they trust, and what they execute."""

from __future__ import annotations

import os
import socket

import pytest

from phalanx.launch import ray_ask
from phalanx.launch.ray_warm import RayWarm


@pytest.fixture
def listener(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(tmp_path / "warm"))
        listening.listen()
        listening.settimeout(10)
        yield listening


@pytest.fixture
def line(listener):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.connect(listener.getsockname())
        yield asking


def test_the_environment_is_handed_to_nobody_but_the_same_user(listener, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert not ray_ask._is_forked(listener.getsockname())
    accepted, _ = listener.accept()
    with accepted:
        assert socket.recv_fds(accepted, 1, 4)[:2] == (b"", [])


def test_nobody_but_the_same_user_is_forked_for(listener, line, monkeypatch):
    def fork():
        raise AssertionError("forked for a stranger")

    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    monkeypatch.setattr(os, "fork", fork)
    warm = RayWarm(listener, os.getpid())
    try:
        line.send(b"+")  # from another user not even looked at
        assert warm._take() is None
    finally:
        os.close(warm._owner)
