"""Draw README's moving picture from two real runs: python docs/assets/make_recovery_picture.py

Trains a small net on four ranks twice: once undisturbed, once with rank 2 killed (SIGKILL) after a step. Every rank notes when it
ended each step. The picture plays the seconds around the loss, slowed down; the weights of both runs are compared.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from phalanx import Callback, Trainer
from phalanx.zoo.data import load

RANKS, VICTIM, LOST_AFTER, SLOWER, PAUSE = 4, 2, 60, 4, 3.0
BEFORE, AFTER = 0.6, 1.0
WIDTH, LEFT, RIGHT, TOP, LANE = 820, 92, 24, 84, 34
COLOURS = {"old": "#4c8dff", "new": "#2fbf71", "lost": "#ff5c5c", "ink": "#e8ebf0", "dim": "#8b94a3", "back": "#15181c"}


class Clock(Callback):
    """A callback that notes the end of each step of its rank; the victim ends itself once."""

    def __init__(self, folder: str, *, lose: bool) -> None:
        self.folder, self.lose = Path(folder), lose

    def on_step_end(self, trainer, info) -> None:
        """Note the time, and be lost."""
        rank = int(os.environ["RANK"])
        with (self.folder / f"rank-{rank}.jsonl").open("a") as file:
            file.write(json.dumps([info.step, time.time(), os.getpid()]) + "\n")
        marker = self.folder / "lost"
        if self.lose and rank == VICTIM and info.step == LOST_AFTER and not marker.exists():
            marker.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: str, *, lose: bool) -> torch.Tensor:
    """Train and return all weights as one vector."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 10))
    loader = DataLoader(load("digits"), batch_size=16, shuffle=True)
    options = {"learning_rate": 3e-3, "max_restarts": 3, "verbosity": "quiet", "run_dir": f"{folder}/run"}
    trainer = Trainer(model=model, num_workers=RANKS, batch_size=16, epochs=8, callbacks=[Clock(folder, lose=lose)], **options)
    trainer.fit(loader)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def read(folder: str) -> tuple[list[list[tuple[int, float, int]]], float]:
    """Return each rank's (step, time, process) and the time of the loss."""
    ranks = [
        [tuple(json.loads(line)) for line in (Path(folder) / f"rank-{rank}.jsonl").read_text().splitlines()]
        for rank in range(RANKS)
    ]
    return ranks, float((Path(folder) / "lost").read_text())


def text(x: float, y: float, words: str, colour: str = "ink", size: int = 14, **more: str) -> str:
    """Return a line of text."""
    rest = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{COLOURS[colour]}" font-size="{size}"{rest}>{words}</text>'


def draw(ranks: list[list[tuple[int, float, int]]], lost: float, words: str) -> str:
    """Return the SVG: a lane per rank, a bar per step, uncovered from left to right."""
    first, last = lost - BEFORE, lost + AFTER
    back = min(t for step, t, _ in ranks[VICTIM] if t > lost)

    def at(moment: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (min(max(moment, first), last) - first) / (last - first)

    bars, labels = [], []
    for rank, steps in enumerate(ranks):
        y = TOP + rank * LANE
        labels.append(text(12, y + 16, f"rank {rank}", "dim"))
        for (_, begin, _), (_, end, process) in zip(steps, steps[1:], strict=False):
            pause = begin < back and end > lost + 0.01
            if end < first or begin > last or (pause and rank == VICTIM):
                continue
            colour = "new" if rank == VICTIM and process != steps[0][2] else "old"
            if pause:  # the others wait: an outline
                bars.append(
                    f'<rect x="{at(begin):.1f}" y="{y + 1}" width="{at(end) - at(begin):.1f}" height="20" rx="3" fill="none" '
                    f'stroke="{COLOURS["dim"]}" stroke-dasharray="3 3"/>'
                )
            else:
                width = max(at(end) - at(begin) - 1, 1)
                bars.append(
                    f'<rect x="{at(begin):.1f}" y="{y}" width="{width:.1f}" height="22" rx="2" fill="{COLOURS[colour]}"/>'
                )
    for moment, colour in ((lost, "lost"), (back, "new")):
        bars.append(
            f'<path d="M{at(moment):.1f} {TOP - 14}V{TOP + RANKS * LANE}" stroke="{COLOURS[colour]}" stroke-width="2"/>'
        )
    bars.append(text(at(lost) - 6, TOP - 8, f"rank {VICTIM} is killed", "lost", 13, text_anchor="end"))
    bars.append(text(at(back) + 6, TOP - 8, f"{back - lost:.2f} s later all go on", "new", 13))
    foot = TOP + RANKS * LANE + 22
    span = (last - first) * SLOWER
    turn = f'dur="{span + PAUSE:.1f}s" repeatCount="indefinite"'
    share = span / (span + PAUSE)
    clip = (
        f'<clipPath id="past"><rect x="0" y="0" height="400" width="{WIDTH}"><animate attributeName="width" '
        f'values="{LEFT};{WIDTH};{WIDTH}" keyTimes="0;{share:.3f};1" {turn}/></rect></clipPath>'
    )
    done = (
        f'<g>{text(LEFT, foot, words, "new")}<animate attributeName="opacity" values="0;0;1;1" '
        f'keyTimes="0;{share * 0.6:.3f};{share * 0.7:.3f};1" {turn}/></g>'
    )
    head = text(12, 30, "Four ranks train. One is lost. The others wait, keep their memory, and go on.", size=16)
    slow = text(
        WIDTH - RIGHT, foot + 22, f"a bar is a step; played {SLOWER} times slower", "dim", 12, text_anchor="end"
    )
    height = foot + 36
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" xmlns="http://www.w3.org/2000/svg" role="img" '
        f'aria-label="A lost rank is replaced in place" font-family="ui-sans-serif, system-ui, sans-serif">\n{clip}\n'
        f'<rect width="{WIDTH}" height="{height}" rx="10" fill="{COLOURS["back"]}"/>\n{head}\n'
        + "\n".join(labels)
        + '\n<g clip-path="url(#past)">\n'
        + "\n".join(bars)
        + f"\n</g>\n{done}\n{slow}\n</svg>\n"
    )


def main() -> None:
    """Run, compare and draw."""
    with tempfile.TemporaryDirectory() as quiet, tempfile.TemporaryDirectory() as disturbed:
        whole = train(quiet, lose=False)
        other = train(disturbed, lose=True)
        ranks, lost = read(disturbed)
    repeated = len(ranks[0]) - len({step for step, _, _ in ranks[0]})
    if repeated or not torch.equal(whole, other):
        sys.exit(f"{repeated} steps were repeated; the weights differ by {(whole - other).abs().max():.2e}")
    path = Path(__file__).with_name("recovery.svg")
    path.write_text(draw(ranks, lost, "no step repeated; at the end the weights are those of the quiet run, bit for bit"), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
