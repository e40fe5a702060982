"""Ranks tell each other what they mean to do before they do it, so that a disagreement is an error and not a hang.

In round k every rank passes on to the rank 2^k further what it has heard so far. After log2(n) rounds everybody has
heard of everybody, and so either all ranks raise or none does, and the wire can be used again. What was to be written
is undefined after a disagreement.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import torch

from phalanx.comm.collectives.channel import Handle, P2PChannel
from phalanx.errors import CommunicationError

_TEXT_BYTES = 124
_LAYOUT = struct.Struct(f"<ii{_TEXT_BYTES}s{_TEXT_BYTES}s")
HEADER_BYTES = _LAYOUT.size
"""What one rank sends in one round."""
INLINE_BYTES = 128 << 10
"""Up to so much data travels with a header: beyond, a second message costs little."""

_NONE = -1
_REMEMBERED = 256
"""Headers that are kept, by what they say."""


@dataclass(frozen=True)
class Seen:
    """What some ranks mean to do: one rank's word, and that of a rank that means something else."""

    rank: int
    text: bytes
    other: int = _NONE
    other_text: bytes = b""

    def and_also(self, heard: Seen) -> Seen:
        """Put together what two sets of ranks mean to do."""
        if self.other != _NONE or (heard.other == _NONE and heard.text == self.text):
            return self
        if heard.other != _NONE:
            return heard
        return Seen(self.rank, self.text, heard.rank, heard.text)


def describe(collective: str, tensor: torch.Tensor | None, op: str | None = None) -> str:
    """Return what must be equal on all ranks, in words."""
    words = [collective]
    if op is not None:
        words.append(op)
    if tensor is not None:
        words.append(f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}")
    return " ".join(words)


def start_check(
    channel: P2PChannel, description: str, *, always: bool = False, inline: torch.Tensor | None = None
) -> None:
    """Begin to find out whether every rank means to do this; whoever first waits for data has the answer before.

    `inline`: what this rank sends to the next one first, at most INLINE_BYTES, on all ranks or on none. It travels with
    the header; the collective takes what came from the rank before by `P2PChannel.take_inline`.

    A wire that is not `checked` asks nothing, unless `always`. The tag counts the calls too, so that what a failed call
    left behind meets nobody later.
    """
    channel.settle()  # an earlier collective that never waited, because it failed on this rank
    if channel.size == 1 or not (channel.checked or always):
        return
    channel.calls += 1
    if channel.checked:
        channel.tag = zlib.crc32(f"{channel.calls} {channel.peers} {description}".encode()) >> 1
    if channel.is_batched:
        inline = None
    enquiry = channel.tally.question = MismatchCheck(channel, description, inline)
    channel.tally.inline = enquiry if inline is not None else None
    if channel.is_batched:
        channel.settle()


class MismatchCheck:
    """The rounds in which ranks hear of each other. The first one is under way when it is made."""

    def __init__(self, channel: P2PChannel, description: str, inline: torch.Tensor | None = None) -> None:
        self._wire = channel
        self._inline = inline
        self._heard = Seen(channel.peers[channel.rank], description.encode()[:_TEXT_BYTES])
        self._header = _header_of(channel, description, self._heard)
        self._distance = 1
        self._departures: list[Handle] = []
        self._pass_on()

    def settle(self) -> None:
        """Take part in all rounds; raise when a rank means something else."""
        while True:
            self._listen()
            self._distance *= 2
            if self._distance >= self._wire.size:
                break
            self._pass_on()
        for departure in self._departures:
            departure.wait()
        if self._heard.other != _NONE:
            raise _disagreement(self._heard)

    def _pass_on(self) -> None:
        """Tell the rank `distance` further what was heard, and ask to hear from the one as far behind."""
        channel = self._wire
        outgoing = self._header if self._heard.other == _NONE else _packed(self._heard, channel)
        self._incoming = torch.empty_like(outgoing)
        if self._distance == 1 and not channel.is_batched:
            # gloo takes a shorter message in a longer place: a rank need not know whether data comes along.
            self._incoming = channel.scratch(HEADER_BYTES + INLINE_BYTES, outgoing, name="inline")
            self._first = self._incoming
            outgoing = self._with_inline(outgoing)
        self._arrival = channel.receive(self._incoming, (channel.rank - self._distance) % channel.size, is_control=True)
        departure = channel.send(outgoing, (channel.rank + self._distance) % channel.size, is_control=True)
        self._departures.append(departure)

    def _with_inline(self, header: torch.Tensor) -> torch.Tensor:
        if self._inline is None:
            return header
        self._wire.tally.control_bytes -= self._inline.nbytes
        self._wire.tally.sent_bytes += self._inline.nbytes
        return torch.cat((header, self._inline.view(torch.uint8)))

    def wait(self) -> None:
        """Wait for the data that came with the header of the rank before, and for the answer."""
        self._wire.settle()

    def payload(self, like: torch.Tensor) -> torch.Tensor:
        """Return the data that came along, once `wait` has returned; valid until the next collective."""
        return self._first[HEADER_BYTES : HEADER_BYTES + like.nbytes].view(like.dtype)

    def _listen(self) -> None:
        self._arrival.wait()
        # All but the number of the rank: what ranks that agree send is equal, and needs no reading.
        incoming = self._incoming[:HEADER_BYTES]
        if torch.equal(incoming[4:], self._header[4:]):
            return
        rank, other, text, other_text = _LAYOUT.unpack(bytes(incoming.cpu().numpy()))
        self._heard = self._heard.and_also(Seen(rank, text.rstrip(b"\0"), other, other_text.rstrip(b"\0")))


def _header_of(channel: P2PChannel, description: str, own: Seen) -> torch.Tensor:
    """Return what a rank sends that has heard of no disagreement; kept, for training repeats its collectives."""
    header = channel.headers.get(description)
    if header is None:
        if len(channel.headers) >= _REMEMBERED:
            channel.headers.clear()
        header = channel.headers[description] = _packed(own, channel)
    return header


def _packed(heard: Seen, channel: P2PChannel) -> torch.Tensor:
    header = bytearray(_LAYOUT.pack(heard.rank, heard.other, heard.text, heard.other_text))
    return torch.frombuffer(header, dtype=torch.uint8).to(channel.device)


def _disagreement(heard: Seen) -> CommunicationError:
    (first, first_text), (second, second_text) = sorted(
        [(heard.rank, heard.text.decode(errors="replace")), (heard.other, heard.other_text.decode(errors="replace"))]
    )
    return CommunicationError(
        f"the ranks disagree on a collective: rank {first} calls {first_text}, rank {second} calls {second_text}",
        hint="Every rank must make the same calls, in one order, with the same shape, dtype and op.",
    )
