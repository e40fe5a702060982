"""SQuAD: its files, and its scores of answers as the official script computes them.

The rules of the script, evaluate-v2.0.py (equal to v1.1 where every question has an answer):
texts are compared in lower case, without punctuation and the articles a, an, the, their words joined by one space;
"exact" is 1 for equal texts, "f1" is that of the two bags of words; of several gold answers the best counts. Where the
gold or the given answer is empty ("no answer"), both scores are 1 if both are empty, else 0.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.errors import DataError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_FORMAT = (
    'The format: {"data": [{"paragraphs": [{"context": "...", "qas": [{"id": "1", "question": "...", '
    '"answers": [{"text": "...", "answer_start": 0}]}]}]}]}'
)
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(answer: str) -> str:
    """Return an answer as it is compared.

    >>> normalized("The  Eiffel-Tower, an icon!")
    'eiffeltower icon'
    """
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, gold: str) -> float:
    """Return 1 for an answer that is equal to a gold one, else 0."""
    return float(normalized(answer) == normalized(gold))


def f1_score(answer: str, gold: str) -> float:
    """Return the harmonic mean of the shares of common words in a given and a gold answer."""
    words, expected = normalized(answer).split(), normalized(gold).split()
    if not words or not expected:
        return float(words == expected)
    common = (Counter(words) & Counter(expected)).total()
    return 2 * common / (len(words) + len(expected))


def answer_scores(answer: str, golds: Sequence[str]) -> tuple[float, float]:
    """Return exact match and F1 of an answer, "" for none, with the best of the gold ones; without any: no answer.

    A gold answer of which nothing is left, such as "the", is left out, as in the script.
    """
    counted = [gold for gold in golds if normalized(gold)] or [""]
    return max(exact_match(answer, gold) for gold in counted), max(f1_score(answer, gold) for gold in counted)


class GoldAnswer(NamedTuple):
    """A gold answer, and the letter of the context at which it begins."""

    text: str
    start: int


class Question(NamedTuple):
    """A question about a context; without answers it has none."""

    key: str
    text: str
    context: int
    """Its number in a list of contexts."""
    answers: tuple[GoldAnswer, ...]


def read_squad(paths: Iterable[Path]) -> tuple[list[str], list[Question]]:
    """Return the contexts and questions of files in SQuAD's format, v1.1 or v2.0."""
    contexts: list[str] = []
    questions: list[Question] = []
    for path in paths:
        refused = f"{path} is not in SQuAD's format:"
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{refused} it cannot be read: {error}.", hint=_FORMAT) from error
        for article in _value(document, "data", list, f"{refused} it"):
            for paragraph in _value(article, "paragraphs", list, f"{refused} an article"):
                where = f"{refused} paragraph {len(contexts)}"
                for item in _value(paragraph, "qas", list, where):
                    key = str(_value(item, "id", (str, int), f"{where}, in its qas,"))
                    questions.append(_question(item, key, len(contexts), f"{refused} the question {key}"))
                contexts.append(_value(paragraph, "context", str, where))
    return contexts, questions


def _value(document: Any, name: str, kind: type | tuple[type, ...], where: str) -> Any:
    """Return a field of a JSON object; an error says that it is missing, or of another kind."""
    if not isinstance(document, dict):
        raise DataError(f"{where} has {document!r:.60} in place of an object with '{name}'.", hint=_FORMAT)
    if name not in document:
        raise DataError(f"{where} has no '{name}'.", hint=_FORMAT)
    if not isinstance(document[name], kind):
        kinds: dict[Any, str] = {str: "a text", list: "a list", int: "a whole number"}
        expected = kinds.get(kind, "a text or a number")
        raise DataError(f"{where} has {name} = {document[name]!r:.60}, expected {expected}.", hint=_FORMAT)
    return document[name]


def _question(item: dict[str, Any], key: str, context: int, where: str) -> Question:
    golds = () if item.get("is_impossible") else tuple(_golds(item, where))
    return Question(key, _value(item, "question", str, where), context, golds)


def _golds(item: dict[str, Any], where: str) -> Iterator[GoldAnswer]:
    """Yield the answers of a question: a list of them, or the lists text and answer_start, as Hugging Face has them."""
    answers = item.get("answers")
    if isinstance(answers, dict):
        texts, starts = (_value(answers, name, list, where) for name in ("text", "answer_start"))
        if len(texts) != len(starts):
            raise DataError(f"{where} has {len(texts)} texts of answers, and {len(starts)} of answer_start.")
        answers = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    else:
        answers = _value(item, "answers", list, where)
    for gold in answers:
        yield GoldAnswer(_value(gold, "text", str, where), _value(gold, "answer_start", int, where))


def place_of(answer: GoldAnswer, context: str) -> int | None:
    """Return where an answer is: at its start, else at the occurrence nearest to that; None where it is nowhere."""
    if not answer.text.strip():
        return None
    if answer.start >= 0 and context.startswith(answer.text, answer.start):
        return answer.start
    starts = [match.start() for match in re.finditer(f"(?={re.escape(answer.text)})", context)]
    return min(starts, key=lambda start: abs(start - answer.start), default=None)
