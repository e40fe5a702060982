"""The planner against published measurements: a table of predicted and measured step times, and a picture.

No GPU is needed: the measurements are in tests/recorded/planner. One set of constants per type of GPU
(phalanx/tools/plan/data/gpus.toml) predicts all rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

from published import Row, ibm_meta, published

from phalanx.tools.plan import Cluster, estimate
from phalanx.tools.plan.estimator import Estimator
from phalanx.tools.plan.planner import default_goal
from phalanx.tools.plan.presets import model
from phalanx.tools.plan.search import Constraints, search

GOALS = {"megatron + recomputation": (0.035, 0.08), "mpt": (0.08, None)}


def errors(rows: list[Row]) -> list[tuple[Row, float]]:
    """Return each row with its predicted step time."""
    return [(row, estimate(row.model, row.cluster, row.layout, row.goal).step_seconds) for row in rows]


def summary(found: list[tuple[Row, float]]) -> dict[str, dict[str, float]]:
    """Return mean and worst relative error by source."""
    groups: dict[str, list[float]] = defaultdict(list)
    for row, seconds in found:
        error = seconds / row.seconds - 1
        names = [row.source]
        if row.source in ("megatron", "recomputation"):
            names.append("megatron + recomputation")
        elif row.source.startswith("mpt"):
            names.append("mpt")
        for name in names:
            groups[name].append(error)
    return {
        name: {
            "rows": len(all_of),
            "mean_error": statistics.fmean(abs(error) for error in all_of),
            "worst_error": max(all_of, key=abs),
        }
        for name, all_of in groups.items()
    }


def speed() -> tuple[int, float]:
    """Return how many layouts the search examines for 70B parameters on 512 GPUs, and its CPU seconds."""
    shape, cluster = model("llama-70b"), Cluster(gpu="h100", gpus=512)
    goal = replace(default_goal(shape, cluster), seq_len=32768, global_batch=1024)
    Estimator(shape, cluster, goal)
    begin = time.process_time()
    found = search(shape, cluster, goal, Constraints())
    return found.searched, time.process_time() - begin


def draw(found: list[tuple[Row, float]], path: Path) -> None:
    """Write predicted against measured step times as a picture."""
    import math

    size, margin = 560, 60
    low, high = math.log10(0.2), math.log10(400)
    colours = {"megatron": "#1f77b4", "recomputation": "#d62728", "mpt": "#2ca02c", "nemo": "#9467bd"}

    def at(seconds: float) -> float:
        return (math.log10(seconds) - low) / (high - low) * size

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size + 2 * margin} {size + 2 * margin}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="100%" height="100%" fill="white"/><g transform="translate({margin},{margin})">',
        f'<rect width="{size}" height="{size}" fill="none" stroke="#999"/>',
        f'<line x1="0" y1="{size}" x2="{size}" y2="0" stroke="#444"/>',
    ]
    for factor in (0.92, 1.08):
        shift = at(factor) - at(1.0)
        parts.append(
            f'<line x1="0" y1="{size - shift}" x2="{size}" y2="{-shift}" stroke="#bbb" stroke-dasharray="4 3"/>'
        )
    for tick in (0.3, 1, 3, 10, 30, 100, 300):
        parts.append(f'<text x="{at(tick)}" y="{size + 18}" text-anchor="middle">{tick:g}</text>')
        parts.append(f'<text x="-8" y="{size - at(tick) + 4}" text-anchor="end">{tick:g}</text>')
    for row, seconds in found:
        colour = colours[row.source.split()[0]]
        x, y = at(row.seconds), size - at(seconds)
        label = f"{row.source} {row.name}: {row.seconds:.2f} s, predicted {seconds:.2f} s"
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}" fill-opacity=".65">'
            f"<title>{label}</title></circle>"
        )
    for index, (name, colour) in enumerate(colours.items()):
        parts.append(f'<circle cx="14" cy="{18 + 20 * index}" r="5" fill="{colour}"/>')
        parts.append(f'<text x="26" y="{22 + 20 * index}">{name}</text>')
    parts.append(
        f'<text x="{size / 2}" y="{size + 42}" text-anchor="middle">measured step in seconds (dashed: 8%)</text>'
    )
    parts.append(
        f'<text transform="translate(-44,{size / 2}) rotate(-90)" text-anchor="middle">predicted</text></g></svg>'
    )
    path.write_text("\n".join(parts), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--svg", type=Path, help="write the picture to this file")
    parser.add_argument("--json", type=Path, help="write every row to this file")
    parser.add_argument("--all", action="store_true", help="print the rows of MPT, too")
    options = parser.parse_args()
    found, outside = errors(published()), errors(list(ibm_meta()))
    for row, seconds in [*found, *outside]:
        if options.all or not row.source.startswith("mpt"):
            error = seconds / row.seconds - 1
            print(
                f"{row.source:<16} {row.name:<44} measured {row.seconds:8.2f} s  predicted {seconds:8.2f} s  "
                f"{error:+6.1%}"
            )
    print()
    for name, group in (summary(found) | {"ibm + meta, not fitted": summary(outside)["ibm + meta"]}).items():
        goal = GOALS.get(name)
        asked = (
            "" if goal is None else f"   (goal: mean {goal[0]:.1%}" + (f", worst {goal[1]:.0%})" if goal[1] else ")")
        )
        print(
            f"{name:<26} {group['rows']:>3} rows  mean {group['mean_error']:.2%}  worst {group['worst_error']:+.1%}"
            f"{asked}"
        )
    layouts, seconds = speed()
    print(f"\nsearch: {layouts:,} layouts of llama-70b on 512 GPUs with sequences of 32,768 in {seconds:.2f} s")
    if options.svg:
        draw(found, options.svg)
    if options.json:
        rows = [{"source": r.source, "row": r.name, "measured": r.seconds, "predicted": s} for r, s in found]
        options.json.write_text(json.dumps({"rows": rows, "summary": summary(found)}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
