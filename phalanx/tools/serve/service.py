"""Answer many requests with one model: a thread computes the next token of all of them in one batch."""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import torch

from phalanx.errors import UsageError
from phalanx.observe.guard import say_to_user
from phalanx.zoo.models.generation import KVCache, Sampling
from phalanx.zoo.recipe import TextCode
from phalanx.zoo.text_model import TextModel, open_text

_PLACES = 256
"""Buffers of the cache grow to a multiple of this, so that few requests make them grow."""


class TextPiece(NamedTuple):
    """What an answer has become since the last piece."""

    text: str
    finish: str | None
    """Why the answer has ended: "stop" (an end token or a stop text) or "length"; "error" where it failed."""
    tokens: int
    """All tokens of the answer so far."""


@dataclass(eq=False, kw_only=True)
class TextRequest:
    """One answer that is wanted."""

    prompt: list[int]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    seed: int | None = None
    stop: Sequence[str] = ()
    emit: Callable[[TextPiece], None] = lambda piece: None
    """Called in the service's thread with each piece of the answer."""
    cancelled: bool = False


class _Answer:
    """A request while it is answered: its tokens, and the text that was not sent yet."""

    def __init__(self, request: TextRequest, code: TextCode, ends: frozenset[int], device: torch.device) -> None:
        self.request = request
        self.made: list[int] = []
        self.finish: str | None = None
        self._code, self._ends = code, ends
        self._generator = torch.Generator(device)
        if request.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(request.seed)
        self._begin = self._sent = 0
        """Tokens from `_begin` on are decoded together, those before `_sent` are sent or held."""
        self._text_held = ""

    @property
    def length(self) -> int:
        """All tokens, with those of the prompt."""
        return len(self.request.prompt) + len(self.made)

    def draw(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the next token [1, 1] from logits [1, vocabulary], by the request's own generator."""
        return self.request.sampling.draw(logits, self._generator)

    def add(self, token: int) -> None:
        """Add a token, and send what of the text is certain."""
        ended = token in self._ends
        self.made.append(token)
        if ended:
            self.finish = "stop"
        elif len(self.made) >= self.request.max_tokens:
            self.finish = "length"
        self._text_held += "" if ended else self._new_text()
        places = [position for stop in self.request.stop if (position := self._text_held.find(stop)) >= 0]
        if places:
            self._text_held, self.finish = self._text_held[: min(places)], "stop"
        ready = len(self._text_held) if self.finish else len(self._text_held) - self._undecided()
        text, self._text_held = self._text_held[:ready], self._text_held[ready:]
        if text or self.finish:
            self.request.emit(TextPiece(text, self.finish, len(self.made)))

    def _new_text(self) -> str:
        """Return the text of tokens that were not shown yet; empty within a letter of several tokens.

        A token's text may depend on the one before it (a space between words), so that both are decoded together.
        """
        before = self._code.text(self.made[self._begin : self._sent])
        now = self._code.text(self.made[self._begin :])
        if now.endswith("\N{REPLACEMENT CHARACTER}") and self.finish is None:
            return ""
        self._begin, self._sent = self._sent, len(self.made)
        return now[len(before) :]

    def _undecided(self) -> int:
        """Return how many letters at the end may be the beginning of a stop text."""
        longest = max((len(stop) - 1 for stop in self.request.stop), default=0)
        for size in range(min(longest, len(self._text_held)), 0, -1):
            if any(stop.startswith(self._text_held[-size:]) for stop in self.request.stop):
                return size
        return 0


def _fail(request: TextRequest) -> None:
    """End an answer as failed; where it cannot be sent either, the service goes on."""
    try:
        request.emit(TextPiece("", "error", 0))
    except Exception:  # noqa: BLE001 - the caller's own error: shown here
        say_to_user(traceback.format_exc())


class TextService:
    """A language model and the thread that runs it. Requests join the batch between two tokens, and leave it likewise.

    Each request has a row of the cache. A step computes the rows up to the highest one that is in use: a free row
    below costs time, so that new requests take the lowest.
    """

    def __init__(self, text: TextModel, *, device: str = "auto", max_batch: int = 16) -> None:
        device_name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        if device_name == "cuda" and not torch.cuda.is_available():
            raise UsageError("--device cuda, but torch sees no GPU here", hint="Run on the CPU with --device cpu.")
        if max_batch < 1:
            raise UsageError(f"--max-batch {max_batch}: it must be at least 1.")
        self.text = text
        self.context = text.model.config.seq_len
        self._model = text.model.to(device_name).eval()
        self._device = torch.device(device_name)
        self._rows: list[_Answer | None] = [None] * max_batch
        self._waiting: deque[TextRequest] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._failures = 0
        """How many batches in a row have failed as a whole."""
        self._thread = threading.Thread(target=self._run, name="text-service", daemon=True)
        self._thread.start()

    @classmethod
    def load(cls, name: str, *, checkpoint: str = "best", device: str = "auto", max_batch: int = 16) -> Self:
        """Return a service of a run or a Hugging Face folder."""
        return cls(open_text(name, checkpoint), device=device, max_batch=max_batch)

    def submit(self, request: TextRequest) -> None:
        """Begin to answer a request as soon as a row is free."""
        with self._changed:
            if self._closed:
                request.emit(TextPiece("", "error", 0))
                return
            self._waiting.append(request)
            self._changed.notify()

    @property
    def load_now(self) -> dict[str, int]:
        """How many requests are being answered, and how many wait for a row."""
        return {"active": sum(row is not None for row in self._rows), "waiting": len(self._waiting)}

    @property
    def is_failing(self) -> bool:
        """Whether two batches in a row failed as a whole, for example because the GPU is lost."""
        return self._failures >= 2

    def close(self) -> None:
        """End the thread after its current step; unfinished answers end as failed."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            try:
                with torch.inference_mode(), KVCache(self._model) as cache:
                    while self._wait_for_work():
                        self._admit(cache)
                        self._step(cache)
                        self._failures = 0
            except Exception:  # noqa: BLE001 - a request that fails must not end the service: shown here, and answered
                self._failures += 1
                say_to_user(traceback.format_exc())
            self._fail_all()

    def _wait_for_work(self) -> bool:
        """Wait until there is something to do; return False when the service is closed."""
        with self._changed:
            while not self._closed and not self._waiting and not any(self._rows):
                self._changed.wait()
        return not self._closed

    def _fail_all(self) -> None:
        """End all answers of a batch that failed, or of a service that is closed."""
        requests = [row.request for row in self._rows if row is not None]
        self._rows = [None] * len(self._rows)
        while self._closed and self._waiting:
            requests.append(self._waiting.popleft())
        for request in requests:
            _fail(request)

    @contextmanager
    def _row_alone(self, number: int) -> Iterator[None]:
        """Let an error inside end the answer of one row, and no other."""
        row = self._rows[number]
        try:
            yield
        except Exception:  # noqa: BLE001 - shown here, and answered
            say_to_user(traceback.format_exc())
            self._rows[number] = None
            if row is not None:
                _fail(row.request)

    def _admit(self, cache: KVCache) -> None:
        """Give free rows to requests that wait, and draw the first token of each."""
        for number, row in enumerate(self._rows):
            if row is None and self._waiting:
                request = self._waiting.popleft()
                if request.cancelled:
                    continue
                answer = _Answer(request, self.text.code, self.text.end_tokens, self._device)
                self._rows[number] = answer
                places = len(request.prompt) + request.max_tokens
                cache.reserve(number + 1, min(self.context, places + -places % _PLACES))
                prompt = torch.tensor([request.prompt], device=self._device)
                lengths = torch.tensor([len(request.prompt)], device=self._device)
                logits = cache.prefill(prompt, lengths, number)
                with self._row_alone(number):
                    answer.add(int(answer.draw(logits)))
                self._release(number)

    def _step(self, cache: KVCache) -> None:
        """Draw the next token of every answer; rows that are free compute at place 0, which no answer reads."""
        count = max((number + 1 for number, row in enumerate(self._rows) if row is not None), default=0)
        if count == 0:
            return
        rows = self._rows[:count]
        last = [[0] if row is None else row.made[-1:] for row in rows]
        places = [0 if row is None else row.length - 1 for row in rows]
        tokens, at = torch.tensor(last, device=self._device), torch.tensor(places, device=self._device)
        logits = cache.step(tokens, at, max(places) + 1, ragged=count > 1)
        answers = {number: row for number, row in enumerate(rows) if row is not None}
        drawn: dict[int, torch.Tensor] = {}
        for number, answer in answers.items():
            with self._row_alone(number):
                drawn[number] = answer.draw(logits[number : number + 1])
        next_tokens = torch.cat(list(drawn.values())).flatten().tolist() if drawn else []
        for number, token in zip(drawn, next_tokens, strict=True):
            with self._row_alone(number):
                answers[number].add(token)
            self._release(number)

    def _release(self, number: int) -> None:
        row = self._rows[number]
        if row is not None and (row.finish is not None or row.request.cancelled):
            self._rows[number] = None
