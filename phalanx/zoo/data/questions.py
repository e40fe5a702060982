"""Extractive question answering: questions with windows of their contexts, and the score of the answers.

A sample is one window, `[begin] question [separator] context [separator]`. A context that does not fit is cut into
windows that overlap; if the answer is not in a window, its label is position 0.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.config.option import limited
from phalanx.data.fetch import GatherDataset
from phalanx.errors import DataError, UsageError
from phalanx.zoo.data.files import of_split
from phalanx.zoo.data.pieces import TextPieces
from phalanx.zoo.data.places import Root, find_files
from phalanx.zoo.data.splits import check_fraction, held_out
from phalanx.zoo.data.squad import Question, answer_scores, place_of, read_squad

_KEPT_SPANS = 20
"""How many spans of a window compete if several answers are wanted: some have the same text."""
_NAMED = 3
"""How many questions a warning names."""


class Window(NamedTuple):
    """A part of a context, in tokens of it: `first` up to before `stop`."""

    question: int
    first: int
    stop: int


class QuestionWindows(GatherDataset):
    """Windows of contexts, each with its question: input_ids, token_type_ids, attention_mask and labels.

    Labels are, by position in the window: the first and last token of the answer, the first and last of the context.
    """

    tokenizer: str | None = None

    def __init__(
        self,
        contexts: Sequence[str],
        questions: Sequence[Question],
        pieces: TextPieces,
        *,
        seq_len: int,
        stride: int,
        longest_answer: int,
        null_threshold: float = 0.0,
        n_best: int = 1,
    ) -> None:
        self.contexts, self.questions, self.seq_len = contexts, questions, seq_len
        self._n_best = n_best
        self.vocab_size = pieces.vocab_size
        used = {question.context for question in questions}
        self._contexts = pieces.encode([text if number in used else "" for number, text in enumerate(contexts)])
        self._question_pieces = pieces.encode([question.text for question in questions])
        self._begin, self._separator = pieces.special("begin"), pieces.special("separator")
        self._padding = pieces.special("padding")
        self.windows: list[Window] = []
        self._answers = [self._tokens_of(question) for question in questions]
        for number in range(len(questions)):
            self.windows += self._cut(number, stride)
        self.metrics = {"answers": AnswerScores(self, longest_answer, null_threshold=null_threshold, count=n_best)}

    def _cut(self, number: int, stride: int) -> list[Window]:
        question_tokens, length = (
            len(self._question_pieces[number].tokens),
            len(self._contexts[self.questions[number].context].tokens),
        )
        room = self.seq_len - question_tokens - 3
        if room < self.seq_len // 2:
            raise DataError(
                f"the question {self.questions[number].key} has {question_tokens} tokens, which leaves less than "
                f"half of a window of {self.seq_len} for its context.",
                hint=f"Write: --set data.seq_len={2 * question_tokens + 8} or more, or leave the question out.",
            )
        windows = [Window(number, 0, min(room, length))]
        while windows[-1].stop < length:
            first = windows[-1].first + min(stride, room)
            windows.append(Window(number, first, min(first + room, length)))
        return windows

    def _tokens_of(self, question: Question) -> tuple[int, int] | None:
        """Return the first and last token of the first answer that is in the context; None without one."""
        context, spans = self.contexts[question.context], self._contexts[question.context].spans
        for answer in question.answers:
            if (start := place_of(answer, context)) is not None:
                end = start + len(answer.text)
                first = bisect.bisect_right(spans, start, key=lambda span: span[1])
                last = bisect.bisect_left(spans, end, key=lambda span: span[0]) - 1
                return first, max(first, last)
        return None

    def __len__(self) -> int:
        return len(self.windows)

    def gather(self, index: Tensor) -> dict[str, Tensor]:
        """Return a batch of windows, int64."""
        rows = [self._row(self.windows[number]) for number in index.tolist()]
        tokens = torch.full((len(rows), self.seq_len), self._padding)
        kinds, mask = torch.zeros_like(tokens), torch.zeros_like(tokens)
        for row, (question, context, _) in enumerate(rows):
            tokens[row, : len(question) + len(context)] = torch.tensor(question + context)
            kinds[row, len(question) : len(question) + len(context)] = 1
            mask[row, : len(question) + len(context)] = 1
        labels = torch.tensor([row[2] for row in rows])
        return {"input_ids": tokens, "token_type_ids": kinds, "attention_mask": mask, "labels": labels}

    def _row(self, window: Window) -> tuple[list[int], list[int], list[int]]:
        """Return the two parts of a window, and its labels."""
        question = [self._begin, *self._question_pieces[window.question].tokens, self._separator]
        context = self._contexts[self.questions[window.question].context].tokens[window.first : window.stop]
        labels, answer = [0, 0], self._answers[window.question]
        if answer is not None and window.first <= answer[0] and answer[1] < window.stop:
            labels = [len(question) + token - window.first for token in answer]
        return question, [*context, self._separator], [*labels, len(question), len(question) + len(context) - 1]

    def predictions(self, outputs: Tensor) -> list[dict[str, Any]]:
        """Return what a model's outputs for all windows say of each question, for `phalanx predict`."""
        samples, scores = torch.arange(len(self)), self.metrics["answers"]
        found = scores.found(scores(outputs, self.gather(samples)["labels"]), samples)
        return [
            {
                "row": number,
                "id": self.questions[number].key,
                "question": self.questions[number].text,
                "answer": scores.answer(answers),
                **({"no_answer": answers.doubt} if scores.may_abstain else {}),
                **({"best": scores.candidates(answers)} if self._n_best > 1 else {}),
            }
            for number, answers in sorted(found.items())
        ]

    def answer_text(self, window: Window, first: int, last: int) -> str:
        """Return the text from one position of a window to another."""
        shift = window.first - len(self._question_pieces[window.question].tokens) - 2
        context = self.questions[window.question].context
        spans = self._contexts[context].spans
        return self.contexts[context][spans[first + shift][0] : spans[last + shift][1]]


class Span(NamedTuple):
    """An answer that a model finds in a window: the sum of both logits, and the first and last position."""

    score: float
    window: Window
    first: int
    last: int


class FoundAnswers(NamedTuple):
    """What a model finds for a question, over all of its windows."""

    spans: list[Span]
    """The best first."""
    no_answer: float
    """The least score of position 0: that of no answer."""

    @property
    def doubt(self) -> float:
        """How far the score of no answer is above that of the best span."""
        return self.no_answer - self.spans[0].score


class AnswerScores:
    """Exact match and F1, as SQuAD's official script has them, of the best span over all windows of each question.

    A span begins and ends in the context, and has at most `longest` tokens; its score is the sum of both logits. In
    data with unanswerable questions, none is answered if the score of no answer, the least one of position 0, is more
    than `null_threshold` above the best span's. `count`: how many different answers `candidates` returns.
    """

    def __init__(self, data: QuestionWindows, longest: int, *, null_threshold: float = 0.0, count: int = 1) -> None:
        self._data, self._longest, self._null_threshold = data, longest, null_threshold
        self._count = count
        self._kept = 1 if count == 1 else max(_KEPT_SPANS, count)
        self.may_abstain = any(not question.answers for question in data.questions)
        self._windows: dict[int, int] = defaultdict(int)
        for window in data.windows:
            self._windows[window.question] += 1

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """Return for each window the score of no answer, then the score and both positions of each of its spans."""
        logits = output.float()
        time = torch.arange(logits.shape[1], device=logits.device)
        inside = (time >= target[:, 2:3]) & (time <= target[:, 3:4])
        first, last = logits.masked_fill(~inside[..., None], -torch.inf).unbind(-1)
        # By the length of a span, then by its first position.
        scores = [first[:, : len(time) - more] + last[:, more:] for more in range(min(self._longest, len(time)))]
        padded = [torch.nn.functional.pad(score, (0, len(time) - score.shape[1]), value=-torch.inf) for score in scores]
        flat_scores = torch.stack(padded, 1).flatten(1)
        best, flat = flat_scores.topk(min(self._kept, flat_scores.shape[1]), dim=1)
        begin = flat % len(time)
        spans = torch.stack([best.double(), begin, begin + flat // len(time)], 2)
        return torch.cat([logits[:, 0].sum(-1, keepdim=True), spans.flatten(1)], 1)

    def combine(self, rows: Tensor, samples: Tensor) -> dict[str, float]:
        """Return the means over the questions all of whose windows were measured.

        In data with unanswerable questions also the highest F1 that another threshold would give, and that threshold.
        """
        found = self.found(rows, samples)
        golds = {number: [gold.text for gold in self._data.questions[number].answers] for number in found}
        scores = [answer_scores(self.answer(answers), golds[number]) for number, answers in found.items()]
        means = torch.tensor(scores, dtype=torch.float64).reshape(-1, 2).mean(0).tolist()
        result = dict(zip(("exact", "f1"), means, strict=True))
        if self.may_abstain and found:
            doubts = torch.tensor([answers.doubt for answers in found.values()], dtype=torch.float64)
            f1 = [
                (answer_scores(self._text(answers.spans[0]), golds[number])[1], float(not golds[number]))
                for number, answers in found.items()
            ]
            result |= dict(zip(("best_f1", "best_f1_threshold"), _best_threshold(doubts, f1), strict=True))
        return result

    def found(self, rows: Tensor, samples: Tensor) -> dict[int, FoundAnswers]:
        """Return what was found for each question all of whose windows were measured."""
        parts: dict[int, list[tuple[float, list[Span]]]] = defaultdict(list)
        for sample, (no_answer, *numbers) in zip(samples.tolist(), rows.tolist(), strict=True):
            window = self._data.windows[sample]
            triples = [numbers[start : start + 3] for start in range(0, len(numbers), 3)]
            possible = [triple for triple in triples if triple[0] != -math.inf] or triples[:1]
            spans = [Span(score, window, int(first), int(last)) for score, first, last in possible]
            parts[window.question].append((no_answer, spans))
        return {
            number: FoundAnswers(
                sorted((span for _, spans in windows for span in spans), key=lambda span: span.score, reverse=True),
                min(no_answer for no_answer, _ in windows),
            )
            for number, windows in parts.items()
            if len(windows) == self._windows[number]
        }

    def answer(self, found: FoundAnswers) -> str:
        """Return the text of the best answer; empty for none."""
        abstains = self.may_abstain and found.doubt > self._null_threshold
        return "" if abstains else self._text(found.spans[0])

    def candidates(self, found: FoundAnswers) -> list[dict[str, Any]]:
        """Return the best answers, each text once, with their shares of the probability: the softmax of their scores.

        In data with unanswerable questions no answer, an empty text, is one of them.
        """
        scores: dict[str, float] = {}
        for span in found.spans[: self._kept]:
            scores.setdefault(self._text(span), span.score)
        if self.may_abstain:
            scores[""] = found.no_answer
        shares = torch.tensor([*scores.values()], dtype=torch.float64).softmax(0).tolist()
        ranked = sorted(zip(scores, shares, strict=True), key=lambda pair: pair[1], reverse=True)
        return [{"answer": text, "probability": share} for text, share in ranked[: self._count]]

    def _text(self, span: Span) -> str:
        is_empty = span.score == -math.inf  # an empty context
        return "" if is_empty else self._data.answer_text(span.window, span.first, span.last)


def _best_threshold(doubts: Tensor, f1: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the highest mean F1, and the threshold that gives it.

    `f1`: of each question the scores of its best span and of no answer; a question is answered if its doubt is at most
    the threshold.
    """
    ordered, order = doubts.sort()
    answered, abstained = torch.tensor(f1, dtype=torch.float64)[order].unbind(1)
    # Of no question answered, of the one with the least doubt, of two, ...
    totals = torch.cat([answered.new_zeros(1), (answered - abstained).cumsum(0)]) + abstained.sum()
    # Questions of equal doubt are answered together.
    is_possible = torch.cat([ordered[1:] != ordered[:-1], torch.tensor([True])])
    totals[1:][~is_possible] = -math.inf
    best = int(totals.argmax())
    threshold = float(ordered[best - 1]) if best else float(ordered[0]) - 1.0
    return float(totals[best]) / len(f1), threshold


@limited(stride={"minimum": 1}, longest_answer={"minimum": 1}, n_best={"minimum": 1})
def questions(
    split: str = "train",
    root: Root | None = None,
    tokenizer: str | None = None,
    seq_len: int = 128,
    stride: int | None = None,
    longest_answer: int = 30,
    null_threshold: float = 0.0,
    n_best: int = 1,
    val_fraction: float = 0.1,
) -> QuestionWindows:
    """Return questions in SQuAD's format, of a file or of the .json files of a folder, as windows of `seq_len` tokens.

    Tokens are those of the Hugging Face tokenizer in the folder `tokenizer` or `root/tokenizer`, else bytes. The next
    window begins `stride` tokens (half a window) later. Without files named dev*, val* or test*, a part of the contexts
    is held out. If there are unanswerable questions, one is not answered if no answer scores more than `null_threshold`
    above the best span. `n_best`: how many answers to each question `phalanx predict` gives.
    """
    if root is None:
        raise UsageError("the data set 'questions' needs a file in SQuAD's format", hint="Write: --data ./squad")
    stride = max(1, seq_len // 2) if stride is None else stride
    if stride > seq_len:
        raise UsageError(f"stride = {stride}: at most seq_len, which is {seq_len}")
    check_fraction(val_fraction, split)
    source = find_files(root)
    folder = source.folder
    paths = source.files if folder is None else sorted(folder.glob("*.json"))
    if not paths:
        raise DataError(f"{folder} has no .json file with questions.", hint="Give a file in SQuAD's format.")
    chosen, part = of_split(folder, paths, split)
    contexts, questions = read_squad(chosen)
    if not questions:
        raise DataError(f"{', '.join(map(str, chosen))}: there is no question in it.")
    if (rows := held_out(len(contexts), part, val_fraction)) is not None:
        of_split_contexts = set(rows)
        questions = [question for question in questions if question.context in of_split_contexts]
    questions, note = checked_answers(contexts, questions, keep_all=split == "val")
    if tokenizer is None and folder is not None and (folder / "tokenizer").is_dir():
        tokenizer = str(folder / "tokenizer")
    windows = QuestionWindows(
        contexts,
        questions,
        TextPieces(tokenizer),
        seq_len=seq_len,
        stride=stride,
        longest_answer=longest_answer,
        null_threshold=null_threshold,
        n_best=n_best,
    )
    windows.tokenizer, windows.notes = tokenizer, (note,) if note else ()
    return windows


def checked_answers(
    contexts: Sequence[str], questions: Sequence[Question], *, keep_all: bool
) -> tuple[list[Question], str]:
    """Return the questions that can be used, and a note about answers that are not where their files say.

    A question none of whose answers is in its context cannot be trained on; `keep_all`: it is scored nevertheless.
    """

    moved: list[Question] = []
    lost: list[Question] = []
    for question in questions:
        places = [place_of(answer, contexts[question.context]) for answer in question.answers]
        if any(position != answer.start for position, answer in zip(places, question.answers, strict=True)):
            (lost if set(places) == {None} else moved).append(question)
    if not moved and not lost:
        return list(questions), ""
    wrong = [question.key for question in (*moved, *lost)]
    named = ", ".join(wrong[:_NAMED]) + (", ..." if len(wrong) > _NAMED else "")
    note = f"warning: {len(wrong)} of {len(questions)} questions have answers that are not at answer_start ({named}): "
    note += f"{len(moved)} are elsewhere in the context"
    if lost:
        note += f", {len(lost)} are not in it and {'are scored' if keep_all else 'left out of training'}"
    left_out = set() if keep_all else set(lost)
    return [candidate for candidate in questions if candidate not in left_out], note
