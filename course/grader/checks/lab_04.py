"""Lab 04, profiling: what a profile says, the work of the mended trainer, its results, and the report."""

from __future__ import annotations

import statistics
import sys
import threading
import time
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from grader.checks.saving import ask, reported
from grader.checks.written import check_report
from grader.exercise import Attempt, Exercise, Mistake
from grader.ranks import Answer

_TEMPLATE = "module-202/labs/lab-04-profiling/starter/trainer.py"
_STARTER = Path(__file__).resolve().parents[2] / Path(_TEMPLATE).parent
_MOST_COLLECTIVES = 3
_LEAST_SPEED_UP = 1.5
if str(_STARTER) not in sys.path:  # answers import slow_trainer; ranks get this path
    sys.path.append(str(_STARTER))


def run_trainer(
    module: ModuleType, rank: int, world: int, kind: str, seed: int, steps: int, options: dict[str, Any]
) -> dict[str, Any]:
    """Train with a trainer of the learner's file, and count its work."""
    slow = import_module("slow_trainer")
    data = slow.Pictures(seed)
    real_decode, decodes, passes, types = data.decode, [0], [0], set()

    def decode(index: int) -> Tensor:
        decodes[0] += threading.current_thread() is threading.main_thread()
        return real_decode(index)  # type: ignore[no-any-return]

    data.decode = decode
    trainer = getattr(slow if kind == "SlowTrainer" else module, kind)(data, **options)

    def seen(layer: nn.Module, _: Any, output: Tensor) -> None:
        passes[0] += layer is trainer.model and not torch.is_grad_enabled()
        if isinstance(layer, nn.Linear) and torch.is_grad_enabled():
            types.add(str(output.dtype).removeprefix("torch."))

    for layer in trainer.model.modules():
        layer.register_forward_hook(seen)
    history = trainer.fit(steps)
    grads = {str(each.grad.dtype) for each in trainer.model.parameters() if each.grad is not None}
    return {
        "losses": list(history.losses),
        "accuracies": dict(history.accuracies),
        "seconds": list(history.seconds),
        "decodes": decodes[0],
        "validations": passes[0],
        "types": sorted(types),
        "kept": sorted({str(each.dtype) for each in trainer.model.parameters()} | grads),
    }


def collectives(answer: Answer) -> int:
    """Return the number of collectives of a rank."""
    return sum(call.kind != "barrier" for call in answer.calls)


def train(attempt: Attempt, kind: str, seed: int, steps: int, ranks: int = 2, **options: Any) -> list[Answer]:
    """Run a trainer on some ranks."""
    own = attempt.answer.with_name("slow_trainer.py")
    if own.exists() and own.read_bytes() != (_STARTER / "slow_trainer.py").read_bytes():
        raise Mistake("slow_trainer.py was changed: it is the baseline; write what is better into trainer.py")
    return attempt.run(run_trainer, ranks, (kind, seed, steps, options))


def same_results(found: dict[str, Any], wanted: dict[str, Any], who: str, tolerance: float = 1e-3) -> None:
    """Raise where losses or accuracies are not those of the slow trainer."""
    if len(found["losses"]) != len(wanted["losses"]):
        raise Mistake(f"{who}: {len(found['losses'])} losses for {len(wanted['losses'])} steps")
    for step, (one, other) in enumerate(zip(found["losses"], wanted["losses"], strict=True)):
        if abs(one - other) > tolerance * max(1.0, abs(other)):
            raise Mistake(
                f"{who}: the loss of step {step} is {one:.6f}, and that of the slow trainer {other:.6f}: it must be the"
                " same training, only faster"
            )
    if found["accuracies"].keys() != wanted["accuracies"].keys():
        raise Mistake(
            f"{who}: accuracies after the steps {sorted(found['accuracies'])}, the slow trainer has them after"
            f" {sorted(wanted['accuracies'])}"
        )
    worst = max((abs(found["accuracies"][step] - value) for step, value in wanted["accuracies"].items()), default=0.0)
    if worst > 0.05:
        raise Mistake(f"{who}: an accuracy differs from that of the slow trainer by {worst:.3f}")


def grade_bottlenecks(attempt: Attempt) -> None:
    """Grade `lab-04-bottlenecks`: equal results, less work, measured speed."""
    seed, steps = attempt.seed(), 24
    fast = train(attempt, "FastTrainer", seed, steps)
    for answer in fast:
        found, who = answer.value, f"rank {answer.rank} of 2"
        if collectives(answer) > _MOST_COLLECTIVES * steps:
            raise Mistake(
                f"{who}: {collectives(answer) / steps:.0f} collectives per step; the model has 22 parameters in 4"
                f" micro-batches, and {_MOST_COLLECTIVES} per step are enough: one buffer for all gradients, sent once"
                " per step"
            )
        if found["decodes"] > 640:
            raise Mistake(
                f"{who}: {found['decodes']} pictures were decoded in the main thread in {steps} steps; there are 640,"
                " so most were decoded several times: keep what is decoded, or decode in the background"
            )
        if found["validations"] > steps // 10:
            raise Mistake(
                f"{who}: {found['validations']} passes over the validation pictures in {steps} steps; validation was"
                f" asked for after every 10 steps, {steps // 10} times"
            )
    slow = train(attempt, "SlowTrainer", seed, steps)
    for answer in fast:
        same_results(answer.value, slow[0].value, f"rank {answer.rank} of 2")
    three = train(attempt, "FastTrainer", seed, 8, ranks=3)
    same_results(three[0].value, {**slow[0].value, "losses": slow[0].value["losses"][:8], "accuracies": {}}, "3 ranks")
    ratio = statistics.median(slow[0].value["seconds"]) / statistics.median(fast[0].value["seconds"])
    if ratio < _LEAST_SPEED_UP:
        raise Mistake(f"a step is {ratio:.2f} times as fast as the slow trainer's; {_LEAST_SPEED_UP} is asked for")


def grade_accumulation(attempt: Attempt) -> None:
    """Grade `lab-04-accumulation`: the exchange does not depend on the micro-batches; bf16 computes in bf16."""
    seed, steps = attempt.seed(), 10
    runs = {number: train(attempt, "FastTrainer", seed, steps, accumulate=number)[0] for number in (1, 4)}
    same_results(runs[4].value, runs[1].value, "4 micro-batches instead of 1")
    counts = {number: (collectives(run), sum(call.bytes for call in run.calls)) for number, run in runs.items()}
    if counts[4] != counts[1]:
        raise Mistake(
            f"with accumulate=4, {counts[4][0] / steps:.0f} collectives with {counts[4][1] / steps:,.0f} bytes per"
            f" step; with accumulate=1, {counts[1][0] / steps:.0f} with {counts[1][1] / steps:,.0f}: gradients are"
            " added up first, and sent once"
        )
    mixed = train(attempt, "FastTrainer", seed, steps, precision="bf16")[0].value
    if mixed["types"] != ["bfloat16"]:
        raise Mistake(f"precision='bf16': linear layers gave {mixed['types']} in training; it should be bfloat16")
    if mixed["kept"] != ["torch.float32"]:
        raise Mistake(f"precision='bf16': weights and gradients are {mixed['kept']}; they should stay float32")
    if mixed["losses"] == runs[4].value["losses"]:
        raise Mistake("precision='bf16' gave the same losses as fp32 to the last bit: nothing was computed in bf16")
    same_results({**mixed, "accuracies": {}}, {**runs[4].value, "accuracies": {}}, "precision='bf16'", 0.03)


@reported
def profiled(module: ModuleType, warmup: int, steps: int, mms: int) -> None:
    """Profile steps whose content is known."""
    numbers: list[int] = []
    matrix = torch.ones(8, 8)

    def step(number: int) -> None:
        numbers.append(number)
        if number < warmup:
            torch.cumsum(matrix, 0)  # must not be recorded
        with record_function("phase: outer"):
            for _ in range(mms):
                torch.mm(matrix, matrix)
            with record_function("phase: inner"):
                time.sleep(0.02)

    table = module.profile_steps(step, warmup, steps)
    if numbers != list(range(warmup + steps)):
        raise Mistake(
            f"warmup={warmup}, steps={steps}: step was called with {numbers}; 0 to {warmup + steps - 1} is right"
        )
    extra = [name for name in table if name.startswith("ProfilerStep")]
    if extra:
        raise Mistake(f"the table has {extra[0]}: leave out the profiler's own ranges")
    missing = [name for name in ("phase: outer", "phase: inner", "aten::mm") if name not in table]
    if missing:
        raise Mistake(f"the table has no {missing[0]}; it has {sorted(table)[:6]}")
    if "aten::cumsum" in table:
        raise Mistake("the table has an operation of the warm-up steps: give torch.profiler a schedule")
    calls = table["aten::mm"][0]
    if calls == mms * steps and steps > 1:
        raise Mistake(f"aten::mm has {calls} calls: those of all {steps} steps; divide by the number of steps")
    if calls != mms:
        raise Mistake(f"aten::mm has {calls} calls per step; {mms} are made")
    outer, inner = table["phase: outer"][1], table["phase: inner"][1]
    if not 15 <= inner <= 20 * 15:
        raise Mistake(f"a range that sleeps for 20 ms has {inner:.4f}: write milliseconds per step")
    if outer < inner:
        raise Mistake(
            f"'phase: outer' has {outer:.2f} ms, and 'phase: inner' inside it {inner:.2f}: count what is inside"
        )


def grade_profile(attempt: Attempt) -> None:
    """Grade `lab-04-profile`."""
    ask(
        attempt,
        profiled,
        attempt.random.randrange(1, 4),
        attempt.random.randrange(2, 5),
        attempt.random.randrange(3, 9),
    )


def grade_report(attempt: Attempt) -> None:
    """Grade `lab-04-report`: the recorded runs are of these trainers, and the report says what they say."""
    steps = 40
    fast = train(attempt, "FastTrainer", 0, steps)[0]
    slow = train(attempt, "SlowTrainer", 0, 2)[0]
    counted = {
        "before": {"decodes": slow.value["decodes"] / 2, "collectives": collectives(slow) / 2, "validations": 1.0},
        "after": {
            "decodes": fast.value["decodes"] / steps,
            "collectives": collectives(fast) / steps,
            "validations": fast.value["validations"] / steps,
        },
    }
    counted["after"]["loss"] = fast.value["losses"][-1]
    check_report(attempt.answer.parent, counted, _STARTER / "slow_trainer.py", _LEAST_SPEED_UP)


EXERCISES = (
    Exercise(
        name="lab-04-profile",
        title="A profile that can be read: calls and time per step",
        template=_TEMPLATE,
        target="profile_steps",
        points=20,
        grade=grade_profile,
    ),
    Exercise(
        name="lab-04-bottlenecks",
        title="Three bottlenecks found and mended, the results unchanged",
        template=_TEMPLATE,
        target="FastTrainer",
        points=40,
        grade=grade_bottlenecks,
    ),
    Exercise(
        name="lab-04-accumulation",
        title="Accumulate, send once; products in bf16",
        template=_TEMPLATE,
        target="FastTrainer",
        points=20,
        grade=grade_accumulation,
    ),
    Exercise(
        name="lab-04-report",
        title="A report whose numbers can be repeated",
        template=_TEMPLATE,
        target="FastTrainer",
        points=20,
        grade=grade_report,
    ),
)
