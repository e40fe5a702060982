"""What a Keras task may be given as data; without TensorFlow, as the process that starts the ranks checks it."""

from __future__ import annotations

from typing import Any

from phalanx.errors import DataError, UsageError, a_type


def is_arrays(data: Any) -> bool:
    """Whether data is (inputs, targets) or (inputs, targets, sample weights) as arrays."""
    return isinstance(data, tuple) and len(data) in (2, 3) and all(hasattr(part, "shape") for part in data)


def check_data(data: Any, name: str) -> None:
    """Raise for data that Keras cannot use, before any process starts."""
    if is_arrays(data):
        rows = {len(part) for part in data}
        if len(rows) > 1:
            raise DataError(f"{name} has arrays of {' and '.join(str(count) for count in sorted(rows))} rows")
        if rows == {0}:
            raise DataError(f"{name} is empty")
    elif isinstance(data, tuple) and len(data) in (2, 3):
        index, part = next((n, part) for n, part in enumerate(data) if not hasattr(part, "shape"))
        raise UsageError(f"{name}[{index}] is {a_type(part)}, not an array", hint="Give numpy.asarray(...).")
    elif not callable(data) and not hasattr(data, "element_spec"):
        raise UsageError(
            f"{name} is {a_type(data)}",
            hint="Give a tuple of arrays (inputs, targets), a tf.data.Dataset of batches, or a function that returns "
            "one (the only way for datasets to reach processes that phalanx starts).",
        )
