"""Draw the pictures of lecture 7: exposed communication by bucket size, and the roofline of an H100."""

from __future__ import annotations

import math
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from draw import Picture  # noqa: E402

LAYERS, LAYER_MB, BACKWARD_MS, MB_PER_MS = 48, 65.0, 4.0, 22.0
PEAK, BANDWIDTH = 989.0, 3.35
KERNELS = (("large product", 2340.6), ("product, 16 tokens", 15.9), ("GELU", 2.5), ("residual addition", 0.17))
"""Operations per byte, of lecture 7, section 3.1."""


def exposed_ms(bucket_mb: float, latency_ms: float) -> float:
    """The model of lecture 7, section 4.1."""
    now = network_free = filled = 0.0
    for layer in range(LAYERS):
        now += BACKWARD_MS
        filled += LAYER_MB
        while filled >= bucket_mb or (layer == LAYERS - 1 and filled > 0):
            size = min(bucket_mb, filled)
            filled -= size
            network_free = max(now, network_free) + latency_ms + size / MB_PER_MS
    return max(0.0, network_free - now)


def buckets(folder: Path) -> None:
    """Draw the exposed time over the bucket size for three latencies."""
    picture = Picture(760, 350, "Communication after the end of backward (192 ms), by bucket size; 3.1 GB, 22 GB/s")
    left, top, width, height = 70, 50, 520, 240

    def place(bucket: float, milliseconds: float) -> tuple[float, float]:
        return left + width * math.log10(bucket) / 3.5, top + height * (1 - min(milliseconds, 200) / 200)

    for level in range(0, 201, 50):
        y = place(1, level)[1]
        picture.line(left, y, left + width, y, dashed=True)
        picture.text(left - 8, y + 4, f"{level} ms", size=11, anchor="end", soft=True)
    for bucket in (1, 5, 25, 100, 400, 3120):
        picture.text(place(bucket, 0)[0], top + height + 18, f"{bucket}", size=11, anchor="middle", soft=True)
    picture.text(left + width / 2, top + height + 40, "bucket, MB", size=12, anchor="middle", soft=True)
    sizes = [10 ** (step / 40) for step in range(140)] + [3120.0]
    for row, (latency, color) in enumerate(((2.0, "pink"), (0.5, "blue"), (0.05, "green"))):
        points = [(size, exposed_ms(size, latency)) for size in sizes]
        picture.curve([place(*point) for point in points if point[1] <= 200], color)
        picture.box(left + width + 16, top + 10 + row * 22, 12, 12, color=color)
        picture.text(left + width + 34, top + 20 + row * 22, f"latency {latency:g} ms", size=11)
    picture.save(folder / "m202-buckets.svg")


def roofline(folder: Path) -> None:
    """Draw the attainable speed over the operations per byte."""
    picture = Picture(760, 340, "Roofline of an H100: 989 TFLOP/s in bf16, 3.35 TB/s")
    left, top, width, height = 100, 50, 600, 230

    def place(intensity: float, tflops: float) -> tuple[float, float]:
        return left + width * (math.log10(intensity) + 1) / 5, top + height * (1 - (math.log10(tflops) + 1) / 4.3)

    for tflops in (0.1, 1, 10, 100, 1000):
        y = place(1, tflops)[1]
        picture.line(left, y, left + width, y, dashed=True)
        picture.text(left - 8, y + 4, f"{tflops:g} TFLOP/s", size=11, anchor="end", soft=True)
    for intensity in (0.1, 1, 10, 100, 1000, 10000):
        picture.text(place(intensity, 1)[0], top + height + 18, f"{intensity:g}", size=11, anchor="middle", soft=True)
    picture.text(left + width / 2, top + height + 40, "operations per byte", size=12, anchor="middle", soft=True)
    ridge = PEAK / BANDWIDTH
    picture.curve([place(0.1, 0.1 * BANDWIDTH), place(ridge, PEAK), place(10000, PEAK)], "blue")
    for name, intensity in KERNELS:
        x, y = place(intensity, min(PEAK, intensity * BANDWIDTH))
        picture.box(x - 5, y - 5, 10, 10, color="orange")
        picture.text(x + 10, y + 18, name, size=11)
    x, y = place(ridge, PEAK)
    picture.text(x - 6, y - 8, f"ridge: {ridge:.0f}", size=11, anchor="end", soft=True)
    picture.save(folder / "m202-roofline.svg")


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    buckets(target)
    roofline(target)
