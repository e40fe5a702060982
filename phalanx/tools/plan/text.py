"""A plan as text: the verdict, bars of memory and time, the layouts that lost, and the command that trains it."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.config.distributed import toml_value
from phalanx.observe.format import span, table
from phalanx.recipes import find_recipe, recipe_names
from phalanx.recipes.imports import is_import_path
from phalanx.tools.plan.cluster import FITTED
from phalanx.tools.plan.model import ModelShape, TracedShape
from phalanx.tools.plan.plans import Plan
from phalanx.tools.plan.presets import train_names

WIDTH = 110
_BAR = 60
_BLOCKS = "█▓▒░▚▞▌▖▙▘▐"
_LETTERS = "#=+*%@o:x~-"
_MFU = "MFU: 3 x FLOPs of forward / (time x peak FLOP/s), attention as a full square; HFU: with recomputed products"
_SHOWN_REFUSALS = 4
YOUR_DATA = "./YOUR_DATA"


@dataclass(frozen=True)
class PartsBar:
    """Parts of a whole, drawn to scale: the memory of a kind of rank, or the time of a step."""

    parts: Mapping[str, float]
    whole: float
    unit: str
    caption: str = ""
    label: str = ""
    shares: bool = False
    """Whether text shows the parts in percent."""


@dataclass(frozen=True)
class Section:
    """A part of the answer: a title, and what is below it."""

    title: str
    rows: Sequence[Sequence[str]] = ()
    bars: Sequence[PartsBar] = ()
    lines: Sequence[str] = ()
    code: str = ""

    def text(self) -> str:
        """Return the section for a terminal."""
        lines = [self.title]
        for bar in self.bars:
            label = f"{bar.label:<12} " if bar.label else ""
            parts = {name: 100 * part / bar.whole for name, part in bar.parts.items()} if bar.shares else bar.parts
            lines.append(f"  {label}{draw_bar(bar.parts, bar.whole)} {bar.caption}".rstrip())
            lines.append(f"  {' ' * len(label)}{legend(parts, '%' * bar.shares)}")
        lines += [table(self.rows, "  ")] if self.rows else []
        lines += [textwrap.indent(self.code, "  ")] if self.code else []
        return "\n".join([*lines, *self.lines])


def plan_text(plan: Plan, subject: str) -> str:
    """Return the whole answer; `subject` is what the command calls the model."""
    return "\n\n".join(section.text() for section in sections(plan, subject))


def sections(plan: Plan, subject: str) -> Iterator[Section]:
    """Yield the parts of the answer."""
    refused = [(f"{number:,}", shorten(reason)) for reason, number in plan.refused[:_SHOWN_REFUSALS]]
    why_not = Section("refused, as `phalanx train` would (number of layouts, reason)", refused)
    if plan.best is None:
        yield Section(f"{_subject(plan)}: no layout fits ({plan.searched:,} were examined)")
        changes = [f"  {change}" for change in plan.smallest_change]
        yield Section("shortage, and the smallest changes that make a layout fit", lines=changes)
        yield from [why_not] if refused else []
        return
    estimate = plan.best.estimate
    yield Section(f"{_subject(plan)}: fits", [row for row in _verdict(plan) if row[1]])
    yield Section(f"memory per GPU, of {estimate.memory_limit_gib:.1f} GiB", bars=list(_memory(plan)))
    step = PartsBar(estimate.breakdown, estimate.step_seconds, "s", shares=True)
    yield Section(f"time of a step, {seconds(estimate.step_seconds)}", bars=[step], lines=list(_beside(plan)))
    if plan.runners_up:
        yield Section(f"runners-up of {plan.searched:,} layouts, and why each lost", list(_others(plan)))
    yield from [why_not] if refused else []
    rows = [(name, value, f"[{shorten(origin, 60)}]") for name, value, origin in plan.assumptions]
    changes = [f"{change}: step {relative:+.1%}" for change, relative in plan.sensitivity]
    lines = [wrapped(f"sensitivity: {'; '.join(changes)}")] if changes else []
    if rows or lines:
        yield Section("assumed, and where it comes from", rows, lines=lines)
    if plan.reliability:
        yield Section(f"reliability: {reliability_words(plan)}")
    title = "to train it" if plan.cluster.nodes == 1 else "to train it (or another target of `phalanx submit`)"
    yield Section(title, code=train_command(plan, subject), lines=[f"  {note}" for note in _notes(plan, subject)])
    yield Section("the same as a file for --config", code=settings_toml(plan.settings))


def _notes(plan: Plan, subject: str) -> Iterator[str]:
    """Yield what the printed command leaves open."""
    yield f"{YOUR_DATA} is not planned: a folder of files (tokens: `phalanx data tokenize`), or my_package.data:load"
    if "max_steps" not in plan.settings:
        yield "how long it trains is not planned: give --tokens, or --samples and --epochs"
    if "lora_rank" in plan.settings and not Path(subject).exists():
        yield "adapters change trained weights, which are not planned: --set model.pretrained=FOLDER_OR_RUN"
    recipe = find_recipe(_target(plan, subject)[0])
    if recipe is not None and recipe.gpu_settings.get("compile") and not plan.goal.compile:
        yield f"the recipe {recipe.name} compiles on GPUs, which is faster than planned: --compile plans for it"


def _subject(plan: Plan) -> str:
    cluster, gpu = plan.cluster, gpu_name(plan)
    nodes = f"{cluster.nodes} nodes of {cluster.gpus_per_node}" if cluster.nodes > 1 else "one node"
    return f"{plan.model.name} ({count(plan.model.parameters)} parameters) on {cluster.gpus} x {gpu} ({nodes})"


def gpu_name(plan: Plan) -> str:
    """Return the name of the cluster's GPU."""
    return plan.cluster.gpu if isinstance(plan.cluster.gpu, str) else plan.cluster.gpu.name


def _verdict(plan: Plan) -> Iterator[tuple[str, str]]:
    assert plan.best is not None
    estimate = plan.best.estimate
    low, high = estimate.interval
    unit = "samples" if isinstance(plan.model, TracedShape) or plan.model.patches else "tokens"
    speed = f"{estimate.tokens_per_second_per_gpu:,.0f} {unit}/s per GPU"
    yield "layout", plan.best.layout.title
    yield "step", f"{seconds(estimate.step_seconds)}, {speed}"
    guess = "" if gpu_name(plan).split("-")[0] in FITTED else f"; constants of {gpu_name(plan)} are assumed"
    yield (
        "",
        f"[{seconds(low)} to {seconds(high)} by the errors on 9 in 10 published runs, each left out of the fit{guess}]",
    )
    by_parameters = f" ({estimate.mfu_of_parameters:.1%} by 6 x parameters x tokens)" if unit == "tokens" else ""
    yield "", f"MFU {estimate.mfu:.1%}{by_parameters}, HFU {estimate.hfu:.1%}{_same_hfu(plan)}"
    yield "", f"[{_MFU}]"
    yield "batch", plan.batch
    yield "", plan.doubt
    yield "training", cost_words(plan) if plan.cost else ""


def _same_hfu(plan: Plan) -> str:
    """Say why HFU is MFU beside recomputation."""
    assert plan.best is not None
    again = plan.best.layout.recompute != "none" and plan.best.estimate.hfu == plan.best.estimate.mfu
    return " (no recomputed operation is a product)" if again else ""


def cost_words(plan: Plan) -> str:
    """Return how long the training takes, and its price."""
    cost, words = plan.cost, []
    if "steps" in cost:
        words.append(f"{cost['steps']:,.0f} steps")
    if "days" in cost:
        words.append(seconds(cost["days"] * 86400))
    if "gpu_hours" in cost:
        words.append(f"{rounded(cost['gpu_hours'])} GPU hours")
    words.append(
        f"${rounded(cost['money'])}" if cost.get("money") is not None else "no price known (--instance, --prices)"
    )
    return ", ".join(words)


def _memory(plan: Plan) -> Iterator[PartsBar]:
    assert plan.best is not None
    estimate = plan.best.estimate
    limit = estimate.memory_limit_gib
    for kind, parts in estimate.bars.items():
        used = sum(parts.values())
        yield PartsBar(parts, limit, "GiB", f"{used:.1f} GiB, {limit - used:.1f} free", kind)


def _beside(plan: Plan) -> Iterator[str]:
    """Yield what is hidden in a step, what takes time beside it, and what limits it."""
    assert plan.best is not None
    if hidden := {name: part for name, part in plan.best.estimate.hidden.items() if part > 0}:
        apart = ", ".join(f"{words(name)} {seconds(part)}" for name, part in hidden.items())
        yield f"  hidden behind computation: {apart}"
    if plan.reliability:
        yield f"  beside it: {beside_words(plan)}"
    if plan.binding:
        yield textwrap.indent(wrapped(f"what limits it: {plan.binding}"), "  ")


def draw_bar(parts: Mapping[str, float], whole: float) -> str:
    """Return a bar of parts, each with its own character; what is left of the whole stays empty."""
    glyphs, drawn, total = _glyphs(), "", 0.0
    for glyph, part in zip(glyphs, parts.values(), strict=False):
        total += max(0.0, part)
        drawn += glyph * (round(_BAR * min(1.0, total / (whole or 1.0))) - len(drawn))
    return f"[{drawn:<{_BAR}}]"


def legend(parts: Mapping[str, float], unit: str = "") -> str:
    """Return the parts that are not 0, each with the character of the bar."""
    glyphs = zip(_glyphs(), parts.items(), strict=False)
    return "  ".join(f"{glyph} {words(name)} {part:.1f}{unit}" for glyph, (name, part) in glyphs if part >= 0.05)


def _glyphs() -> str:
    """Return one character per part: blocks on a terminal that shows them, else ASCII."""
    can = sys.stdout.isatty() and (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    return _BLOCKS if can else _LETTERS


def _others(plan: Plan) -> Iterator[tuple[str, ...]]:
    assert plan.best is not None
    best = plan.best.estimate.step_seconds
    for other in plan.runners_up:
        step = other.estimate.step_seconds
        yield seconds(step), f"{step / best - 1:+.1%}", other.layout.title, other.reason


def beside_words(plan: Plan) -> str:
    """Return what takes time beside the steps: checkpoints, and data where loading them is slower than a step."""
    reliability = plan.reliability
    share = reliability["checkpoint_seconds"] / reliability["checkpoint_interval_seconds"]
    samples = f"{plan.goal.global_batch:,} samples per step"
    return f"checkpoints {share:.2%} of the time; data must be loaded as fast ({samples})"


def reliability_words(plan: Plan) -> str:
    """Return how often the job fails, how often it saves, and how much of its time is training."""
    reliability = plan.reliability
    stall, interval = seconds(reliability["checkpoint_seconds"]), seconds(reliability["checkpoint_interval_seconds"])
    return (
        f"{reliability['failures_per_day']:.2g} failures a day, a checkpoint every {interval} (each stalls {stall}), "
        f"{reliability['effective']:.1%} of the time is training"
    )


def train_command(plan: Plan, subject: str) -> str:
    """Return the command that trains this plan: on several nodes the one that submits it to Slurm."""
    verb = ("train",) if plan.cluster.nodes == 1 else ("submit", "slurm")
    flags = [word for name, value in plan.settings.items() for word in _flag(name, value)]
    units: list[str] = []
    for word in map(shlex.quote, ("phalanx", *verb, *_target(plan, subject), *flags)):
        if units and units[-1].startswith("--") and not word.startswith("-"):
            units[-1] += f" {word}"  # no line ends between a flag and its value
        else:
            units.append(word)
    joined = " ".join(unit.replace(" ", "\0") for unit in units)
    lines = textwrap.wrap(joined, WIDTH - 4, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
    return " \\\n".join(lines).replace("\0", " ")


def _target(plan: Plan, subject: str) -> list[str]:
    """Return what is trained: a recipe or a reference model, the user's class or folder, or words for it; and data."""
    shape, seq_len = plan.model, plan.goal.seq_len
    data = ["--data", YOUR_DATA]
    if isinstance(shape, ModelShape) and not shape.patches:
        data += ["--set", f"data.seq_len={seq_len}"]
    if is_import_path(subject) or Path(subject).exists():
        return ["--model", subject, *data]
    recipe, preset, longest = train_names(subject)
    sizes: dict[str, Any] = {}
    if recipe is None and isinstance(shape, ModelShape) and shape.causal and not (shape.experts or shape.patches):
        recipe = "llama" if shape.gated_mlp else "gpt"
        sizes = {"layers": shape.layers, "heads": shape.heads, "hidden": shape.hidden, "vocab_size": shape.vocab}
        sizes["tie_weights"] = str(shape.tied_embeddings).lower()
        sizes |= {"kv_heads": shape.kv_heads or shape.heads, "ffn_hidden": shape.ffn} if shape.gated_mlp else {}
    if recipe is None:
        return ["--model", "YOUR_PACKAGE.MODULE:CLASS", *data]
    if len(data) > 2 and (seq_len > (longest or 0) or sizes):
        sizes["seq_len"] = seq_len
    named = [recipe] if recipe in recipe_names() else ["--model", recipe]
    changes = [word for name, value in sizes.items() for word in ("--set", f"model.{name}={value}")]
    return [*named, *(["--preset", preset] if preset else []), *changes, *data]


def _flag(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    return [flag, str(value)]


def settings_toml(settings: Mapping[str, Any]) -> str:
    """Return the settings as the lines of a file for --config."""
    return "\n".join(f"{name} = {toml_value(value)}" for name, value in settings.items())


def plan_data(plan: Plan, subject: str) -> dict[str, Any]:
    """Return the whole plan as plain data."""
    document = dataclasses.asdict(plan)
    if plan.best is not None:
        for entry, candidate in zip(
            (document["best"], *document["runners_up"]), (plan.best, *plan.runners_up), strict=True
        ):
            entry["estimate"] |= {
                "peak_gib": candidate.estimate.peak_gib,
                "needed_gib": candidate.estimate.needed_gib,
                "fits": candidate.estimate.fits,
            }
            entry["layout"]["words"] = candidate.layout.title
        document |= {"command": train_command(plan, subject), "toml": settings_toml(plan.settings)}
    document["model"]["parameters"] = plan.model.parameters
    if isinstance(plan.model, ModelShape):
        document["model"]["active_parameters"] = plan.model.active_parameters
    return {"fits": plan.fits, **document}


def words(name: str) -> str:
    """Return the name of a part as words."""
    return name.removesuffix("_comm") + " communication" * name.endswith("_comm") if "_" in name else name


def wrapped(text: str) -> str:
    """Return a sentence as lines of the width of the answer."""
    return textwrap.fill(text, WIDTH - 2, subsequent_indent="  ")


def shorten(text: str, width: int = WIDTH - 8) -> str:
    """Return a text cut to a number of characters."""
    return textwrap.shorten(text, width, placeholder=" ...")


def seconds(value: float) -> str:
    """Write a time in one unit: `12.3 days`, `1.4 h`, `35 min`, `12.3 s`, `840 ms`, `90 us`."""
    if value >= 600:
        return span(value) if value >= 3600 else f"{value / 60:.0f} min"
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"


def rounded(number: float) -> str:
    """Write an amount: whole from 100 on, else with three digits."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def count(number: float) -> str:
    """Write a large number: `70.6 B`, `124 M`."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"
