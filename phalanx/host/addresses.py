"""This machine's addresses, network cards and free ports.

gloo listens at the address that the host's own name resolves to. Many systems map that name to loopback, where no other
node can reach it; then the card is chosen by the route to the master's address.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import ipaddress
import os
import random
import socket
import struct
import time
from collections.abc import Mapping

LOOPBACK = "127.0.0.1"
VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
_PORTS = range(15000, 31000)
_LANES = 16
_ELSEWHERE = "192.0.2.1"
"""An address reserved for documentation: looking up the route there sends nothing and finds the default route."""


def loopback_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that keep ranks of one node on loopback: gloo and nccl accept every connection."""
    card = _card_with(LOOPBACK)
    return {name: card for name in (VARIABLE, "NCCL_SOCKET_IFNAME") if card is not None and name not in environ}


def network_environment(master: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that lets ranks on several hosts reach each other, where torch would choose wrongly."""
    if is_loopback(master):  # all nodes are on this machine
        return loopback_environment(environ)
    if VARIABLE in environ:
        return {}
    interface = _interface_to(master)
    return {} if interface is None else {VARIABLE: interface}


def default_interface() -> str | None:
    """Return the card of the default route, else the first one; None where there is none but loopback."""
    address = _address_outside()
    return None if address is None else _card_with(address)


def own_address(master: str, *, one_node: bool = False) -> str:
    """Return this machine's address as other ranks reach it: that of the card on the way to the master.

    Ranks of one node use loopback.
    """
    if one_node or is_loopback(master):
        return LOOPBACK
    address = _address_towards(master)
    if address is None or ipaddress.ip_address(address).is_loopback:  # this is the master, and its name misleads it too
        address = _address_outside()
    return address or LOOPBACK


def ssh_address() -> str:
    """Return where the other end of this ssh session reached this machine; its name where it is not inside of one."""
    address = (os.environ.get("SSH_CONNECTION", "").split() + [""] * 4)[2]
    return socket.gethostname() if address in ("", LOOPBACK, "::1") else address


def free_port(local_rank: int = 0) -> int:
    """Return a free TCP port for a library that listens later and does not accept an open socket.

    It is chosen below the range from which Linux takes ports for sockets without a number, so that none of those gets
    it meanwhile; ranks of one node search different parts of the range.
    """
    draw = random.Random(f"{os.getpid()} {time.time_ns()}")
    first = _PORTS.start + (local_rank % _LANES) * (len(_PORTS) // _LANES)
    while True:
        port = draw.randrange(first, first + len(_PORTS) // _LANES)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port


@functools.cache
def _interface_to(master: str) -> str | None:
    """Return the card on the way to `master`, or None where the host's name is good or nothing better is known."""
    with contextlib.suppress(OSError):  # a name that cannot be resolved is no better than one for loopback
        entries = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
        if not all(ipaddress.ip_address(str(entry[4][0])).is_loopback for entry in entries):
            return None
    address = _address_towards(master)
    if address is None or ipaddress.ip_address(address).is_loopback:  # this is the master, and its name misleads it too
        return default_interface()
    return _card_with(address)


def is_loopback(host: str) -> bool:
    """Whether the user wrote loopback: then all nodes are on this machine, and loopback is right."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _address_towards(host: str) -> str | None:
    """Return this machine's address on the route to a host; a datagram socket connects without sending anything."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _address_outside() -> str | None:
    """Return this machine's address on the default route; in a network without one that of its first card."""
    cards = (address_of_card(name) for _, name in socket.if_nameindex())
    others = (address for address in cards if address is not None and not ipaddress.ip_address(address).is_loopback)
    return _address_towards(_ELSEWHERE) or next(others, None)


def _card_with(address: str) -> str | None:
    return next((name for _, name in socket.if_nameindex() if address_of_card(name) == address), None)


def address_of_card(name: str) -> str | None:
    """Return the IPv4 address of a network card, or None where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
        return socket.inet_ntoa(answer[20:24])
