"""Pairs of texts, what is given and what is to be written, for models with an encoder and a decoder such as T5.

Pairs are rows of table files, or drawn here: letters to copy and letters to sort.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Subset

from phalanx.config.fields import IGNORED_LABEL
from phalanx.config.option import limited
from phalanx.data.fetch import GatherDataset
from phalanx.errors import DataError, UsageError, unknown_name
from phalanx.zoo.data.chats import counted_rows
from phalanx.zoo.data.files import rows_of
from phalanx.zoo.data.masked import byte_sentinels, check_t5
from phalanx.zoo.data.places import Root
from phalanx.zoo.data.splits import check_fraction
from phalanx.zoo.data.tables import read_tokenizer
from phalanx.zoo.t5_tokens import T5_END, T5_PAD

TASKS = ("copy", "sort")
_LOOKED_AT = 1000
"""Pairs whose lengths are counted, to say how many are cut."""
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


class TextPairs(GatherDataset):
    """Pairs as (tokens, targets): both end with token 1; padded by 0, and targets by -100."""

    deterministic = True

    def __init__(
        self,
        rows: Sequence[tuple[str, str]],
        tokenizer: str | None,
        seq_len: int,
        target_len: int,
        where: str,
        notes: Sequence[str] = (),
    ) -> None:
        """`where`: the files of the pairs, for messages; `notes`: what is to be said about them."""
        self._rows, self.seq_len, self._target_len = rows, seq_len, target_len
        bytes_code = byte_sentinels()
        self._tokenizer = None if tokenizer is None else read_tokenizer(tokenizer)
        if self._tokenizer is not None:
            check_t5(self._tokenizer, str(tokenizer))
        self._shift = bytes_code.shift
        self.vocab_size = bytes_code.size if self._tokenizer is None else len(self._tokenizer)
        self.notes = (*notes, *self._cut_note(where))

    def __len__(self) -> int:
        return len(self._rows)

    def gather(self, index: Tensor) -> list[Tensor]:
        """Return (tokens, targets), int64 [batch, seq_len] and [batch, target_len]; longer texts are cut."""
        pairs = [self._rows[number] for number in index.tolist()]
        inputs = [self._padded(first, self.seq_len, T5_PAD) for first, _ in pairs]
        written = [self._padded(second, self._target_len, IGNORED_LABEL) for _, second in pairs]
        return [torch.stack(inputs), torch.stack(written)]

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without its end."""
        if self._tokenizer is None:
            return [byte + self._shift for byte in text.encode()]
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def _cut_note(self, where: str) -> Iterator[str]:
        looked = [self._rows[number] for number in range(min(len(self._rows), _LOOKED_AT))]
        for index, longest, name in ((0, self.seq_len, "seq_len"), (1, self._target_len, "target_len")):
            cut = sum(len(self.encode(row[index])) >= longest for row in looked)
            if cut:
                texts = f"{cut:,} of the first {len(looked):,} {('given', 'written')[index]} texts"
                yield f"{where}: {texts} are longer than {name}={longest}, and cut"

    def _padded(self, text: str, length: int, padding: int) -> Tensor:
        tokens = torch.tensor([*self.encode(text)[: length - 1], T5_END])
        return F.pad(tokens, (0, length - len(tokens)), value=padding)


class _Columns(Sequence[tuple[str, str]]):
    """Two columns of a table as pairs of texts; rows without one of the two are left out."""

    def __init__(self, rows: Any, source: str, target: str, prefix: str) -> None:
        is_part = isinstance(rows, Subset)
        self._rows: Any = rows.dataset if is_part else rows
        numbers = rows.indices if is_part else range(len(rows))
        self._source, self._target, self._prefix = source, target, prefix
        is_whole = [None not in pair for pair in zip(self._rows[source], self._rows[target], strict=True)]
        self._usable = [number for number in numbers if is_whole[number]]
        missing = [number for number in numbers if not is_whole[number]]
        why = f"no {source}, or no {target}"
        self.notes = (f"{counted_rows(missing, 'pair')} skipped: {why}",) if missing else ()

    def __len__(self) -> int:
        return len(self._usable)

    def __getitem__(self, number: Any) -> Any:
        row = self._rows[self._usable[number]]
        return f"{self._prefix}{row[self._source]}", str(row[self._target])


@limited(seq_len={"minimum": 2}, target_len={"minimum": 2})  # one token for the end
def pairs(
    split: str = "train",
    root: Root | None = None,
    source: str = "input",
    target: str = "target",
    prefix: str = "",
    tokenizer: str | None = None,
    seq_len: int = 64,
    target_len: int | None = None,
    tasks: Sequence[str] = TASKS,
    count: int = 20_000,
    val_fraction: float = 0.1,
    seed: int = 0,
) -> TextPairs:
    """Return the columns `source` and `target` of the table files in `root`, or drawn pairs of these `tasks`.

    `prefix` comes before each given text ("translate: "); tokens are bytes, or those of the T5 tokenizer in a folder.
    """
    check_fraction(val_fraction, split)
    if root is not None:
        rows = _Columns(rows_of(root, split, [source, target], val_fraction), source, target, prefix)
        if not len(rows) and (split == "train" or rows.notes):  # a small file may have none to hold out
            raise DataError(f"{root} holds no pairs. {'; '.join(rows.notes)}".strip())
        return TextPairs(rows, tokenizer, seq_len, target_len or seq_len, str(root), rows.notes)
    if tokenizer is not None:
        raise UsageError("tokenizer is for your own texts", hint="Write: --data ./my-pairs, as well.")
    for task in [tasks] if isinstance(tasks, str) else tasks:
        if task not in TASKS:
            raise UsageError(unknown_name("task", task, TASKS, of="drawn pairs"))
    drawn = _drawn(split, [tasks] if isinstance(tasks, str) else list(tasks), count, seed)
    return TextPairs(drawn, None, seq_len, target_len or seq_len, "drawn pairs")


def _drawn(split: str, tasks: list[str], count: int, seed: int) -> list[tuple[str, str]]:
    """Return pairs such as ("sort: dacb", "abcd"); a tenth of `count` for validation, from other letters."""
    draw = random.Random(f"{seed} pairs")
    words = list(dict.fromkeys("".join(draw.choices(_LETTERS, k=draw.randint(3, 10))) for _ in range(count)))
    of_split = [word for number, word in enumerate(words) if (number % 10 == 9) == (split == "val")]
    return [
        (f"{task}: {word}", word if task == "copy" else "".join(sorted(word))) for word in of_split for task in tasks
    ]
