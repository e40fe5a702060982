"""Ranks compare what they are about to do before they do it, so that a mismatch is an error and not a hang.

In round k every rank sends what it knows so far to the rank 2^k further. After log2(n) rounds each rank knows of all
others, so either all ranks raise or none does, and the channel can be used again. The output of a collective is
undefined after a mismatch.
"""

from __future__ import annotations

import struct
import threading
import zlib
from dataclasses import dataclass

import torch
import torch.distributed as dist

from phalanx.comm.collectives.channel import Handle, P2PChannel
from phalanx.errors import CommunicationError
from phalanx.observe.call_ring import CallRing, GroupCalls, call_ring

_TEXT_BYTES = 124
_LAYOUT = struct.Struct(f"<ii{_TEXT_BYTES}s{_TEXT_BYTES}s")
HEADER_BYTES = _LAYOUT.size
"""What one rank sends in one round."""
INLINE_BYTES = 128 << 10
"""Up to so much data is sent together with a header; for more, a second message costs little."""

_NONE = -1
_MAX_HEADERS = 256


@dataclass(frozen=True)
class Announcement:
    """What some ranks are about to do: the description of one rank, and of another rank that differs from it."""

    rank: int
    text: bytes
    other: int = _NONE
    other_text: bytes = b""

    def and_also(self, received: Announcement) -> Announcement:
        """Combine what is known of two sets of ranks."""
        if self.other != _NONE or (received.other == _NONE and received.text == self.text):
            return self
        if received.other != _NONE:
            return received
        return Announcement(self.rank, self.text, received.rank, received.text)


def describe(collective: str, tensor: torch.Tensor, op: str | None = None) -> str:
    """Return what must be equal on all ranks."""
    content = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    return f"{collective} {content}" if op is None else f"{collective} {op} {content}"


def start_check(
    channel: P2PChannel, description: str, *, always: bool = False, inline: torch.Tensor | None = None
) -> None:
    """Start to check that every rank does what `description` says; the first wait for data completes the check.

    `inline`: data for the next rank, at most INLINE_BYTES, on all ranks or on none. It is sent with the header; the
    collective gets what the previous rank sent by `P2PChannel.take_inline`.

    A channel that is not `checked` does nothing, unless `always`. The tag includes the number of the call, so that
    messages of a failed call are never received later.
    """
    channel.finish_check()  # an earlier collective that failed on this rank before it waited
    if channel.size == 1:
        return
    if (ring := call_ring()) is not None:
        _records(channel, ring).enter(description.encode())
    if not (channel.checked or always):
        return
    channel.calls += 1
    if channel.checked:
        channel.tag = zlib.crc32(f"{channel.calls} {channel.peers} {description}".encode()) >> 1
    if channel.is_batched:
        inline = None
    check = channel.state.check = MismatchCheck(channel, description, inline)
    channel.state.inline = check if inline is not None else None
    if channel.is_batched:
        channel.finish_check()


def _records(channel: P2PChannel, ring: CallRing) -> GroupCalls:
    """Return where the calls of these ranks are recorded; a separate thread has its own order."""
    records = channel.state.records.get(channel.peers)
    if records is None:
        ranks = dist.get_process_group_ranks(channel.group or dist.group.WORLD)
        members = [ranks[peer] for peer in channel.peers]
        name = f"messages of {members} in {threading.current_thread().name}"
        records = channel.state.records[channel.peers] = ring.group(name, members)
    return records


class MismatchCheck:
    """The rounds in which ranks compare their descriptions; the constructor starts the first one."""

    def __init__(self, channel: P2PChannel, description: str, inline: torch.Tensor | None = None) -> None:
        self._channel = channel
        self._inline = inline
        self._announcement = Announcement(channel.peers[channel.rank], description.encode()[:_TEXT_BYTES])
        header = channel.headers.get(description)  # kept, as training repeats its collectives
        if header is None:
            if len(channel.headers) >= _MAX_HEADERS:
                channel.headers.clear()
            header = channel.headers[description] = _packed(self._announcement, channel)
        self._header = header
        self._distance = 1
        self._departures: list[Handle] = []
        self._start_round()

    def finish_check(self) -> None:
        """Take part in all rounds; raise where a rank does something else."""
        while True:
            self._finish_round()
            self._distance *= 2
            if self._distance >= self._channel.size:
                break
            self._start_round()
        for departure in self._departures:
            departure.wait()
        if self._announcement.other != _NONE:
            raise _mismatch(self._announcement)

    def _start_round(self) -> None:
        """Send what is known to the rank `distance` further, and receive from the one as far behind."""
        channel = self._channel
        outgoing = self._header if self._announcement.other == _NONE else _packed(self._announcement, channel)
        self._incoming = torch.empty_like(outgoing)
        if self._distance == 1 and not channel.is_batched:
            # gloo can receive a shorter message than its buffer: a rank need not know whether data is inline.
            self._incoming = channel.scratch(HEADER_BYTES + INLINE_BYTES, outgoing, name="inline")
            self._first = self._incoming
            if self._inline is not None:
                channel.state.control_bytes -= self._inline.nbytes
                channel.state.sent_bytes += self._inline.nbytes
                outgoing = torch.cat((outgoing, self._inline.view(torch.uint8)))
        self._arrival = channel.receive(self._incoming, (channel.rank - self._distance) % channel.size, is_control=True)
        departure = channel.send(outgoing, (channel.rank + self._distance) % channel.size, is_control=True)
        self._departures.append(departure)

    def wait(self) -> None:
        """Wait for the inline data of the previous rank, and complete the check."""
        self._channel.finish_check()

    def payload(self, like: torch.Tensor) -> torch.Tensor:
        """Return the inline data, after `wait`; valid until the next collective."""
        return self._first[HEADER_BYTES : HEADER_BYTES + like.nbytes].view(like.dtype)

    def _finish_round(self) -> None:
        self._arrival.wait()
        # Ranks that agree send equal headers, except for the number of the rank: no need to unpack them.
        incoming = self._incoming[:HEADER_BYTES]
        if torch.equal(incoming[4:], self._header[4:]):
            return
        rank, other, text, other_text = _LAYOUT.unpack(bytes(incoming.cpu().numpy()))
        self._announcement = self._announcement.and_also(
            Announcement(rank, text.rstrip(b"\0"), other, other_text.rstrip(b"\0"))
        )


def _packed(announcement: Announcement, channel: P2PChannel) -> torch.Tensor:
    header = bytearray(_LAYOUT.pack(announcement.rank, announcement.other, announcement.text, announcement.other_text))
    return torch.frombuffer(header, dtype=torch.uint8).to(channel.device)


def _mismatch(announcement: Announcement) -> CommunicationError:
    (first, first_text), (second, second_text) = sorted(
        [
            (announcement.rank, announcement.text.decode(errors="replace")),
            (announcement.other, announcement.other_text.decode(errors="replace")),
        ]
    )
    return CommunicationError(
        f"the ranks disagree on a collective: rank {first} calls {first_text}, rank {second} calls {second_text}",
        hint="Every rank must make the same calls, in one order, with the same shape, dtype and op.",
    )
