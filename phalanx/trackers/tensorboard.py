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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from phalanx.errors import UsageError
from phalanx.observe.events import (
    LOGGED,
    CheckpointSaved,
    Event,
    MetricsReported,
    RanksReported,
    RunEnded,
    RunStarted,
    StepDone,
)
from phalanx.observe.run_folder import note_written

_FLUSH_SECONDS = 5.0
_CASTAGNOLI = 0x82F63B78
_DT_FLOAT, _DT_STRING = 1, 7


class Histogram(NamedTuple):
    """The distribution of a tensor's values: `counts[n]` of them are at most `limits[n]`, and above the one before."""

    lowest: float
    highest: float
    number: int
    total: float
    total_squares: float
    limits: Sequence[float]
    counts: Sequence[float]


class TensorBoardSink:
    """Writes curves as scalars, the settings as text and as hyperparameters; a resumed run continues its curves."""

    def __init__(
        self,
        directory: Path | str,
        hparams: Mapping[str, bool | float | str] | None = None,
        config: str = "",
        run_dir: Path | None = None,
    ) -> None:
        """`hparams`: what the HParams page compares; `config`: all settings, as TOML; `run_dir`: of the run."""
        self.directory = Path(directory)
        self._hparams = dict(hparams or {})
        self._config = config
        try:
            from tensorboard.compat.proto import event_pb2
            from tensorboard.plugins.hparams import plugin_data_pb2
        except ImportError as error:
            hint = "Run: pip install 'phalanx[tensorboard]'"
            raise UsageError(f"TensorBoard cannot be imported: {error}", hint=hint) from error
        self._messages: Any = event_pb2
        self._hparams_messages: Any = plugin_data_pb2
        # A name of the kind TensorBoard looks for; the nanoseconds keep two sinks of one second apart.
        seconds, rest = divmod(time.time_ns(), 10**9)
        name = f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}.{os.getpid()}.{rest}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = (self.directory / name).open("xb")
        except OSError as error:
            raise UsageError(
                f"TensorBoard files cannot be written to {directory}: {error.strerror}",
                hint="Set tensorboard to a folder you can write to.",
            ) from error
        if run_dir is not None:
            note_written(run_dir, self.directory / name)
        self._flushed = time.monotonic()
        self._write(self._messages.Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._file.flush()

    def handle(self, event: Event) -> None:
        """Write the event's scalars, if it has any."""
        if isinstance(event, (StepDone, MetricsReported, RanksReported)):
            message = self._messages.Event(wall_time=event.time, step=event.step)
            for tag, value in event.scalars().items():
                message.summary.value.add(tag=tag, simple_value=value)
            self._write(message)
        elif isinstance(event, RunStarted):
            self._begin(event)
        elif isinstance(event, RunEnded):
            self._end(event)
        is_due = time.monotonic() - self._flushed > _FLUSH_SECONDS
        rare = isinstance(event, MetricsReported) and event.split != LOGGED
        if is_due or rare or isinstance(event, (CheckpointSaved, RunStarted, RunEnded)):
            self._file.flush()
            self._flushed = time.monotonic()

    def histograms(self, step: int, by_tag: Mapping[str, Histogram]) -> None:
        """Write distributions, by the names of what they are of."""
        message = self._messages.Event(wall_time=time.time(), step=step)
        for tag, one in by_tag.items():
            histogram = message.summary.value.add(tag=tag).histo
            histogram.min, histogram.max, histogram.num = one.lowest, one.highest, one.number
            histogram.sum, histogram.sum_squares = one.total, one.total_squares
            histogram.bucket_limit.extend(one.limits)
            histogram.bucket.extend(one.counts)
        self._write(message)

    def _begin(self, run: RunStarted) -> None:
        """Write the settings; what an earlier attempt of this run wrote after the first step is not shown any more."""
        first = run.first_step + 1
        log = self._messages.SessionLog(status=self._messages.SessionLog.START)
        self._write(self._messages.Event(wall_time=run.time, step=first, session_log=log))
        message = self._messages.Event(wall_time=run.time, step=first)
        if self._config:
            value = message.summary.value.add(tag="config/text_summary")
            value.metadata.plugin_data.plugin_name = "text"
            value.tensor.dtype = _DT_STRING
            value.tensor.tensor_shape.dim.add(size=1)
            value.tensor.string_val.append(f"```toml\n{self._config}\n```".encode())
        if self._hparams:
            start = self._hparams_messages.SessionStartInfo(start_time_secs=run.time)
            for name, setting in self._hparams.items():
                kind = "bool" if isinstance(setting, bool) else "string" if isinstance(setting, str) else "number"
                setattr(start.hparams[name], f"{kind}_value", setting)
            self._add_hparams(message, session_start_info=start)
        self._write(message)

    def _end(self, end: RunEnded) -> None:
        """Write how the run ended, for the HParams page."""
        message = self._messages.Event(wall_time=end.time, step=end.step)
        status = 2 if end.status == "failed" else 1  # tensorboard.hparams.Status: FAILURE, SUCCESS
        ended = self._hparams_messages.SessionEndInfo(status=status, end_time_secs=end.time)
        self._add_hparams(message, session_end_info=ended)
        self._write(message)

    def _add_hparams(self, message: Any, **content: Any) -> None:
        (kind,) = content
        value = message.summary.value.add(tag=f"_hparams_/{kind}")
        value.tensor.dtype = _DT_FLOAT
        value.tensor.tensor_shape.dim.add(size=0)  # the content is in the metadata; TensorBoard wants a tensor as well
        value.metadata.plugin_data.plugin_name = "hparams"
        value.metadata.plugin_data.content = self._hparams_messages.HParamsPluginData(
            version=0, **content
        ).SerializeToString()

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
