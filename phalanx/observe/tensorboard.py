"""Write TensorBoard event files without TensorFlow.

Only TensorBoard's message definitions are imported, and those when the first sink is made. Its own writers would import
TensorFlow where that is installed, or a stub that takes longer than all the rest; the record format is three lines.
"""

from __future__ import annotations

import functools
import os
import socket
import struct
import time
from pathlib import Path
from typing import IO, Any

from phalanx.errors import UsageError
from phalanx.observe.events import CheckpointSaved, Event, MetricsReported, RunEnded, StepDone

_FLUSH_SECONDS = 5.0
_CASTAGNOLI = 0x82F63B78


class TensorBoardSink:
    """Writes train/loss, learning_rate, grad_norm, throughput, memory and the metrics of each split as scalars."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        try:
            from tensorboard.compat.proto import event_pb2
        except ImportError as error:
            raise UsageError(f"TensorBoard is not installed: {error}", hint="Run: pip install tensorboard") from error
        self._messages: Any = event_pb2
        # A name of the kind TensorBoard looks for; the nanoseconds keep two sinks of one second apart.
        seconds, rest = divmod(time.time_ns(), 10**9)
        name = f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}.{os.getpid()}.{rest}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = (self.directory / name).open("xb")
        except OSError as error:
            raise UsageError(
                f"TensorBoard files cannot be written to {directory}: {error.strerror}",
                hint="Set tensorboard_dir to a folder you can write to.",
            ) from error
        self._flushed = time.monotonic()
        self._write(self._messages.Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._file.flush()

    def handle(self, event: Event) -> None:
        """Write the event's scalars, if it has any."""
        if isinstance(event, (StepDone, MetricsReported)):
            message = self._messages.Event(wall_time=event.time, step=event.step)
            for tag, value in event.scalars().items():
                message.summary.value.add(tag=tag, simple_value=value)
            self._write(message)
        is_due = time.monotonic() - self._flushed > _FLUSH_SECONDS
        if is_due or isinstance(event, (MetricsReported, CheckpointSaved, RunEnded)):
            self._file.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        """Write what is pending and close the file."""
        self._file.close()

    def _write(self, message: Any) -> None:
        data: bytes = message.SerializeToString()
        length = struct.pack("<Q", len(data))
        self._file.write(length + _masked_crc(length) + data + _masked_crc(data))


@functools.cache
def _crc_table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_CASTAGNOLI if value & 1 else 0)
        table.append(value)
    return tuple(table)


def _masked_crc(data: bytes) -> bytes:
    """Return the CRC-32C of `data`, rotated and offset as the record format wants it."""
    table, crc = _crc_table(), 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
