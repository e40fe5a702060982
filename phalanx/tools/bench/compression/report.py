"""The benchmark's tables and its plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError
from phalanx.observe.format import size
from phalanx.tools.bench.compression.advise import Cost, LinkSpeed, advise


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return the runs as aligned columns; `speed-up` compares times to the target loss."""
    head = ["recipe", "link", "compressor", "step ms", "to target s", "speed-up", "final loss", "sent", "of plain"]
    rows = [_row(record, records) for record in records]
    return aligned([head, *rows])


def _row(record: dict[str, Any], records: Sequence[dict[str, Any]]) -> list[str]:
    plain = next(r for r in records if _key(r) == _key(record) and r["compressor"] == "none")
    reached, reference = record["time_to_target_s"], plain["time_to_target_s"]
    return [
        record["recipe"],
        record["link"],
        record["compressor"],
        f"{1000 * record['seconds'] / record['steps']:.1f}",
        "-" if reached is None else f"{reached:.2f}",
        "-" if reached is None or reference is None else f"{reference / reached:.2f}x",
        f"{record['final_loss']:.4f}",
        size(record["sent_bytes"]),
        f"{record['sent_bytes'] / record['plain_bytes']:.1%}",
    ]


def _key(record: dict[str, Any]) -> tuple[str, str]:
    return record["recipe"], record["link"]


def advice(name: str, link: LinkSpeed, compute_s: float, model_bytes: int, ranks: int, costs: Sequence[Cost]) -> str:
    """Return the adviser's answer for one model and one link."""
    found = advise(link, model_bytes=model_bytes, compute_s=compute_s, ranks=ranks, costs=costs)
    head = ["compressor", "step ms", "sends ms", "compresses ms", "verdict", "why"]
    rows = [
        [
            item.name,
            f"{item.step_s * 1000:.2f}",
            f"{item.send_s * 1000:.2f}",
            f"{item.own_s * 1000:.2f}",
            item.verdict if item.name != "none" else "-",
            item.reason,
        ]
        for item in found
    ]
    rate = f"{link.bytes_per_second * 8 / 1e9:.3g} Gb/s, {link.latency_s * 1e6:.0f} us"
    title = f"{name}: {size(model_bytes)} of gradients, {compute_s * 1000:.1f} ms computing, {ranks} ranks, {rate}"
    return f"{title}\n{aligned([head, *rows])}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as columns, separated by two spaces."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def check_can_plot() -> None:
    """Raise before anything has run, where matplotlib is missing."""
    try:
        import matplotlib as _  # noqa: F401
    except ImportError:
        raise UsageError(
            "the picture needs matplotlib, which is not installed",
            hint="Run: pip install 'phalanx[bench]', or leave --plot out.",
        ) from None


def plot(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw, for each recipe, time to the target loss over the links, and bytes sent."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    recipes = list(dict.fromkeys(record["recipe"] for record in records))
    figure, axes = plt.subplots(len(recipes), 2, figsize=(11, 3.6 * len(recipes)), squeeze=False)
    for (left, right), recipe in zip(axes, recipes, strict=True):
        own = [record for record in records if record["recipe"] == recipe]
        _draw_times(left, own)
        _draw_bytes(right, own)
    figure.suptitle(f"Gradient compression, {records[0]['ranks']} ranks, {records[0]['emulation']}", fontsize=9)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise UsageError(f"--plot {path}: {error.strerror}") from None
    finally:
        plt.close(figure)


def _draw_times(axis: Any, records: Sequence[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(record["compressor"] for record in records))
    links = list(dict.fromkeys(record["link"] for record in records))
    width = 0.8 / len(links)
    for number, link in enumerate(links):
        times = {r["compressor"]: r["time_to_target_s"] or 0.0 for r in records if r["link"] == link}
        positions = [n + number * width for n in range(len(names))]
        axis.bar(positions, [times[name] for name in names], width, label=link)
    axis.set_xticks([number + 0.4 - width / 2 for number in range(len(names))], names, rotation=30)
    axis.set_ylabel(f"s to loss {records[0]['target_loss']:.3f} (no bar: not reached)", fontsize=8)
    axis.set_title(records[0]["recipe"])
    axis.legend(fontsize=8)


def _draw_bytes(axis: Any, records: Sequence[dict[str, Any]]) -> None:
    sent = {record["compressor"]: record["sent_bytes"] for record in records}
    axis.bar(list(sent), [max(count, 1) for count in sent.values()], color="slategrey")
    axis.set_yscale("log")
    axis.tick_params("x", rotation=30)
    axis.set_ylabel(f"bytes sent by a rank in {records[0]['steps']} steps", fontsize=8)
