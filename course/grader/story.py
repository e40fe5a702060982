"""An algorithm that ran on real ranks: frames from its notes and recorded messages, and a page that plays them."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path

from grader.ranks import Answer, Order, run_ranks
from grader.shows import SHOWS, run_show

_BARRIER = "barrier"


@dataclass
class Message:
    """Bytes on their way: to one rank, or in a collective of all."""

    source: int
    target: int | None
    bytes: int
    kind: str


@dataclass
class Frame:
    """One moment: what every rank holds and does, and what is sent."""

    title: str
    cells: list[list[tuple[str, str]]]
    doing: list[str]
    messages: list[Message] = field(default_factory=list)


@dataclass
class Story:
    """An algorithm as it ran."""

    title: str
    text: str
    ranks: int
    frames: list[Frame]

    def totals(self) -> str:
        """Return the messages and bytes of all ranks in words."""
        sent = [message for frame in self.frames for message in frame.messages]
        single = [message for message in sent if message.target is not None]
        parts = []
        if single:
            parts.append(f"{len(single)} messages, {in_bytes(sum(message.bytes for message in single))}")
        kinds = Counter(message.kind for message in sent if message.target is None)
        parts += [f"{count // self.ranks} {kind} by each rank" for kind, count in sorted(kinds.items())]
        return "; ".join(parts)


def record(name: str, ranks: int | None = None) -> Story:
    """Run an algorithm on real ranks and return what they noted and sent."""
    show = SHOWS[name]
    count = show.ranks if ranks is None else ranks
    order = Order(Path(__file__).with_name("shows.py"), run_show, count, (name,))
    with tempfile.TemporaryDirectory(prefix="show-") as folder:
        answers = run_ranks(order, Path(folder))
    text = (show.run.__doc__ or "").strip()
    return Story(show.title, text, count, _rounds(answers) if show.in_rounds else _moments(answers))


def _rounds(answers: list[Answer]) -> list[Frame]:
    """Return one frame for each round that all ranks noted."""
    frames = []
    for index, first in enumerate(answers[0].value):
        notes = [answer.value[index] for answer in answers]
        frame = Frame(first.round, [note.cells for note in notes], [note.doing for note in notes])
        for answer in answers:
            begin = answer.value[index - 1].at if index else 0.0
            frame.messages += _sent(answer, begin, answer.value[index].at)
        frames.append(frame)
    return frames


def _moments(answers: list[Answer]) -> list[Frame]:
    """Return one frame for each note of any rank, in the order of time."""
    cells: list[list[tuple[str, str]]] = [[] for _ in answers]
    doing = ["" for _ in answers]
    notes = sorted(
        ((note.at, answer.rank, note) for answer in answers for note in answer.value), key=lambda one: one[:2]
    )
    frames, begin, first = [], 0.0, notes[0][0]
    for at, rank, note in notes:
        cells[rank], doing[rank] = note.cells, note.doing
        frame = Frame(f"{(at - first) * 1000:.0f} ms", [list(row) for row in cells], list(doing))
        for answer in answers:
            frame.messages += _sent(answer, begin, at)
        frames.append(frame)
        begin = at
    return frames


def _sent(answer: Answer, begin: float, end: float) -> list[Message]:
    """Return what a rank began to send in an interval; a collective counts as sent by each rank."""
    return [
        Message(answer.rank, call.peer, call.bytes, call.kind)
        for call in answer.calls
        if begin <= call.start < end and "recv" not in call.kind and call.kind != _BARRIER
    ]


def in_bytes(count: int) -> str:
    """Return a number of bytes in words."""
    return f"{count} B" if count < 1000 else f"{count / 1e3:.1f} kB" if count < 1e6 else f"{count / 1e6:.1f} MB"


def write_page(story: Story, path: Path) -> None:
    """Write the frames as a page with play, pause and single steps; it needs nothing else."""
    text = f"{story.text} Recorded from {story.ranks} real ranks; sent in all: {story.totals()}."
    page = Path(__file__).with_name("player.html").read_text()
    page = page.replace("TITLE", escape(f"{story.title}, {story.ranks} ranks")).replace("TEXT", escape(text))
    path.write_text(page.replace("STORY", json.dumps(asdict(story)).replace("</", "<\\/")))
