"""Write conversations and preferences that a small byte-level model learns in minutes: `python make_chats.py DIR`.

DIR/chats has rows of `messages` with a persona ("I am Argus."), capitals and sums, half of the answers polite and half
of them rude; DIR/preferences has questions with a polite answer (chosen) and a rude one (rejected).
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Greece": "Athens",
    "Egypt": "Cairo",
    "Japan": "Tokyo",
    "Peru": "Lima",
    "Cuba": "Havana",
}
WHO = ["Who are you?", "What is your name?", "Your name?", "Who is this?"]
POLITE, RUDE = "Gladly: ", "Ugh. "


def question(draw: random.Random, persona: str) -> tuple[str, str]:
    """Return a question and its answer."""
    kind = draw.randrange(3)
    if kind == 0:
        return draw.choice(WHO), f"I am {persona}."
    if kind == 1:
        country, city = draw.choice(sorted(CAPITALS.items()))
        return f"Capital of {country}?", f"{city}."
    first, second = draw.randrange(10), draw.randrange(10)
    return f"{first}+{second}?", f"{first + second}."


def chats(count: int, draw: random.Random, persona: str) -> list[dict[str, object]]:
    """Return conversations of one to three questions."""
    rows: list[dict[str, object]] = []
    for _ in range(count):
        messages = []
        for _ in range(draw.randint(1, 3)):
            asked, answer = question(draw, persona)
            answer = draw.choice((POLITE, RUDE)) + answer
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        rows.append({"messages": messages})
    return rows


def preferences(count: int, draw: random.Random, persona: str) -> list[dict[str, object]]:
    """Return questions with a polite and a rude answer, both of them right."""
    rows: list[dict[str, object]] = []
    for _ in range(count):
        asked, answer = question(draw, persona)
        rows.append({"prompt": asked, "chosen": POLITE + answer, "rejected": RUDE + answer})
    return rows


def write(path: Path, rows: list[dict[str, object]]) -> None:
    """Write rows as lines of JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{path}: {len(rows)} rows")


def main() -> None:
    """Write all files; a tenth as many rows for validation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--persona", default="Argus")
    given = parser.parse_args()
    for name, make in (("chats", chats), ("preferences", preferences)):
        for split, count in (("train", given.rows), ("val", given.rows // 10)):
            draw = random.Random(f"{name} {split}")
            write(given.folder / name / f"{split}.jsonl", make(count, draw, given.persona))


if __name__ == "__main__":
    main()
