"""Write the Grafana dashboards of deploy/monitoring with Grafana's own builders; a test keeps the files equal to it.

python tools/grafana_dashboards.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement
from grafana_foundation_sdk.models.dashboard import DataSourceRef

FOLDER = Path(__file__).resolve().parents[1] / "deploy" / "monitoring" / "grafana" / "dashboards"
SOURCE = DataSourceRef(type_val="prometheus", uid="prometheus")
RUN = '{run=~"$run"}'
GPU = '{run=~"$run|"}'  # series of NVIDIA's DCGM exporter have no label run
GPU_LEGEND = "rank {{rank}} {{Hostname}} {{gpu}}"


class Curve(NamedTuple):
    """One panel: what it shows, in which unit, by which queries with their legends."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    about: str = ""


def one(title: str, unit: str, expression: str, legend: str = "{{run}}", about: str = "") -> Curve:
    """Return a panel with one query."""
    return Curve(title, unit, ((expression, legend),), about)


RUNS = {
    "Training": [
        one("Loss", "none", f"phalanx_loss{RUN}"),
        one("Samples per second", "none", f"phalanx_samples_per_second{RUN}"),
        one("Tokens per second", "none", f"phalanx_tokens_per_second{RUN}"),
        one("MFU", "percentunit", f"phalanx_mfu{RUN}"),
        one("Learning rate", "none", f"phalanx_learning_rate{RUN}"),
        one("Gradient norm", "none", f"phalanx_grad_norm{RUN}"),
    ],
    "Health": [
        one("Since the last step", "s", f"time() - max by (run) (phalanx_rank_heartbeat_timestamp_seconds{RUN})"),
        one("Goodput", "percentunit", f"phalanx_goodput_ratio{RUN}", about="Productive share of the time."),
        one("Where the time went", "s", f"phalanx_goodput_seconds{RUN}", "{{category}}"),
        one("Age of the last checkpoint", "s", f"time() - phalanx_checkpoint_timestamp_seconds{RUN}"),
        one("Checkpoint stall", "s", f"phalanx_checkpoint_stall_seconds{RUN}"),
        Curve(
            "Failures and recoveries",
            "none",
            (
                (f"phalanx_failures_total{RUN}", "{{run}} failures"),
                (f"phalanx_recoveries_total{RUN}", "{{run}} recoveries"),
                (f"phalanx_suspected_ranks_total{RUN}", "{{run}} suspected ranks"),
            ),
        ),
    ],
}
RANKS = {
    "Speed": [
        one("Own work per step", "s", f"phalanx_rank_own_seconds{RUN}", "rank {{rank}}", "The slowest rank is on top."),
        one("Slowest rank against the others", "none", f"phalanx_slowest_rank_ratio{RUN}"),
        one("Waiting for data", "percentunit", f"phalanx_rank_data_wait_ratio{RUN}", "rank {{rank}}"),
        one("Waiting for other ranks", "percentunit", f"phalanx_rank_communication_ratio{RUN}", "rank {{rank}}"),
        one("Steps", "none", f"phalanx_rank_step{RUN}", "rank {{rank}}"),
        one(
            "All ranks, own work in quantiles",
            "s",
            'phalanx_ranks_quantile{run=~"$run", gauge="own_seconds"}',
            "quantile {{quantile}}",
        ),
    ],
    "Memory and GPUs": [
        one("Memory", "bytes", f"phalanx_rank_memory_bytes{RUN}", "rank {{rank}}"),
        one(
            "Memory of the limit",
            "percentunit",
            f"phalanx_rank_memory_bytes{RUN} / phalanx_rank_memory_limit_bytes{RUN}",
            "rank {{rank}}",
        ),
        one("GPU utilization", "percent", f"DCGM_FI_DEV_GPU_UTIL{GPU}", GPU_LEGEND),
        one("GPU memory", "mbytes", f"DCGM_FI_DEV_FB_USED{GPU}", GPU_LEGEND),
        one("Power", "watt", f"DCGM_FI_DEV_POWER_USAGE{GPU}", GPU_LEGEND),
        one("Temperature", "celsius", f"DCGM_FI_DEV_GPU_TEMP{GPU}", GPU_LEGEND),
    ],
}
STATS = (
    one("Running", "none", f"sum(phalanx_running{RUN})"),
    one("Ranks", "none", f"sum(phalanx_ranks{RUN})"),
    one("Step", "none", f"max(phalanx_step{RUN})"),
    one("Loss is finite", "none", f"min(phalanx_loss_is_finite{RUN})"),
)


def build(title: str, uid: str, rows: dict[str, list[Curve]]) -> Any:
    """Return a dashboard: figures on top, then a row of panels for each group."""
    names = dashboard.QueryVariable("run").query("label_values(phalanx_step, run)").datasource(SOURCE).multi(True)
    board = dashboard.Dashboard(title).uid(uid).tags(["phalanx"]).refresh("15s").time("now-1h", "now").readonly()
    board.with_variable(names.include_all(True))
    for curve in STATS:
        board.with_panel(_with_queries(stat.Panel(), curve).height(4).span(6))
    for name, curves in rows.items():
        board.with_row(dashboard.Row(name))
        for curve in curves:
            legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
            panel = timeseries.Panel().legend(legend.show_legend(True)).min(0 if curve.unit != "none" else None)
            board.with_panel(_with_queries(panel, curve).height(8).span(8))
    return board.build()


def _with_queries(panel: Any, curve: Curve) -> Any:
    panel = panel.title(curve.title).unit(curve.unit).datasource(SOURCE).description(curve.about)
    for number, (expression, legend) in enumerate(curve.queries):
        query = prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(chr(ord("A") + number))
        panel = panel.with_target(query)
    return panel


def files() -> dict[str, str]:
    """Return the dashboards as JSON, by file name."""
    boards = {
        "runs.json": build("Phalanx: runs", "phalanx-runs", RUNS),
        "ranks.json": build("Phalanx: ranks", "phalanx-ranks", RANKS),
    }
    return {name: JSONEncoder(sort_keys=True, indent=2).encode(board) + "\n" for name, board in boards.items()}


if __name__ == "__main__":
    for name, text in files().items():
        (FOLDER / name).write_text(text)
        print(FOLDER / name, file=sys.stderr)
