"""Ranks tell each other what they mean to do before they do it, so that a disagreement is an error and not a hang.

In round k every rank passes on to the rank 2^k further what it has heard so far. After log2(n) rounds everybody has
heard of everybody, and so either all ranks raise or none does: the wire is left clean in both cases.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from phalanx.errors import CommunicationError

if TYPE_CHECKING:
    from phalanx.comm.wire import Wire

_TEXT_BYTES = 124
_LAYOUT = struct.Struct(f"<ii{_TEXT_BYTES}s{_TEXT_BYTES}s")
HEADER_BYTES = _LAYOUT.size
"""What one rank sends in one round."""

_NOBODY = -1


@dataclass(frozen=True)
class Heard:
    """What some ranks mean to do: one rank's word, and that of a rank that means something else."""

    rank: int
    text: bytes
    other: int = _NOBODY
    other_text: bytes = b""

    def and_also(self, heard: Heard) -> Heard:
        """Put together what two sets of ranks mean to do."""
        if self.other != _NOBODY or (heard.other == _NOBODY and heard.text == self.text):
            return self
        if heard.other != _NOBODY:
            return heard
        return Heard(self.rank, self.text, heard.rank, heard.text)


def describe(collective: str, tensor: torch.Tensor | None, op: str | None = None) -> str:
    """Return what must be equal on all ranks, in words."""
    words = [collective]
    if op is not None:
        words.append(op)
    if tensor is not None:
        words.append(f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}")
    return " ".join(words)


def agree(wire: Wire, description: str, *, always: bool = False) -> None:
    """Return when every rank of the wire means to do this; raise on all of them when one does not.

    A wire that is not `checked` skips this, unless `always`.
    """
    if wire.size == 1 or not (wire.checked or always):
        return
    heard = Heard(wire.peers[wire.rank], description.encode()[:_TEXT_BYTES])
    distance = 1
    while distance < wire.size:
        heard = heard.and_also(_pass_on(heard, wire, distance))
        distance *= 2
    if heard.other != _NOBODY:
        raise _disagreement(heard)


def _pass_on(heard: Heard, wire: Wire, distance: int) -> Heard:
    """Tell the rank `distance` further what was heard, and hear from the one as far behind."""
    header = bytearray(_LAYOUT.pack(heard.rank, heard.other, heard.text, heard.other_text))
    outgoing = torch.frombuffer(header, dtype=torch.uint8).to(wire.device)
    incoming = torch.empty(HEADER_BYTES, dtype=torch.uint8, device=wire.device)
    arrival = wire.receive(incoming, (wire.rank - distance) % wire.size)
    departure = wire.send(outgoing, (wire.rank + distance) % wire.size, is_control=True)
    arrival.wait()
    departure.wait()
    rank, other, text, other_text = _LAYOUT.unpack(bytes(incoming.cpu().numpy()))
    return Heard(rank, text.rstrip(b"\0"), other, other_text.rstrip(b"\0"))


def _disagreement(heard: Heard) -> CommunicationError:
    (first, first_text), (second, second_text) = sorted(
        [(heard.rank, heard.text.decode(errors="replace")), (heard.other, heard.other_text.decode(errors="replace"))]
    )
    return CommunicationError(
        f"the ranks disagree on a collective: rank {first} calls {first_text}, rank {second} calls {second_text}",
        hint="Every rank must make the same calls, in one order, with the same shape, dtype and op.",
    )
