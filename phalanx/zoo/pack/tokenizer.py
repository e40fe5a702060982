"""The tokenizer of a folder of token shards: a given one, or a byte-level BPE that is trained on the corpus."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError, first_line
from phalanx.host.files import replace_file
from phalanx.observe.format import duration
from phalanx.zoo.data.token_shards import TOKENIZER, import_tokenizers, read_tokenizer
from phalanx.zoo.pack.documents import CorpusPart, DocumentOptions, read_documents
from phalanx.zoo.token_data import MANIFEST

END_OF_TEXT = "<|endoftext|>"
_ENDS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|eot_id|>", "<|im_end|>", "[SEP]")
"""Tokens that known tokenizers put after a document, where their folder does not say."""
_TRAINED_BYTES = 1 << 30
"""How much of a corpus a tokenizer is trained on: the merges hardly change after some hundred megabytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizeJob:
    """What is asked for; one of `tokenizer` and `train_bpe` is given."""

    inputs: tuple[str, ...]
    out: Path
    tokenizer: Path | None = None
    train_bpe: int | None = None
    options: DocumentOptions = field(default_factory=DocumentOptions)
    end: str | None = None
    """The token after each document; None: the tokenizer's own."""
    workers: int | None = None
    part_bytes: int = 64 << 20
    overwrite: bool = False


def settle_tokenizer(job: TokenizeJob, parts: list[CorpusPart], say: Callable[[str], None]) -> None:
    """Put the tokenizer into the folder: the given one, or one that is trained on the training documents."""
    path = job.out / TOKENIZER
    if job.train_bpe is not None:
        _put_trained(path, job.train_bpe, job, parts, say)
        return
    assert job.tokenizer is not None, "the command line asks for one of the two"
    content = _tokenizer_content(job.tokenizer)
    if path.is_file() and path.read_bytes() != content and not job.overwrite:
        raise UsageError(
            f"{job.out} has shards of another tokenizer than {job.tokenizer}",
            hint="Give another --out, or --overwrite to replace them.",
        )
    replace_file(path, content)


def _put_trained(
    path: Path, vocab_size: int, job: TokenizeJob, parts: list[CorpusPart], say: Callable[[str], None]
) -> None:
    """Train a tokenizer, unless it was trained on the same documents before."""
    content = [vocab_size, asdict(job.options), [asdict(part) for part in parts]]
    made_of = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    note = job.out / "trained.json"
    if path.is_file() and note.is_file() and json.loads(note.read_text()) == made_of:
        return
    if (job.out / MANIFEST).is_file() and not job.overwrite:
        raise other_input(job.out)
    began = time.monotonic()
    train_bpe(vocab_size, _training_texts(parts, job.options)).save(str(path))
    replace_file(note, json.dumps(made_of))
    say(f"{path}: {vocab_size:,} tokens of byte-level BPE, trained in {duration(time.monotonic() - began)}")


def _tokenizer_content(path: Path) -> bytes:
    """Return the tokenizer.json of a file or of a folder of transformers."""
    file = path / TOKENIZER if path.is_dir() else path
    if file.is_file():
        read_tokenizer(file)
        return file.read_bytes()
    if not path.is_dir():
        raise UsageError(f"--tokenizer {path}: there is nothing at that path")
    try:
        from transformers import AutoTokenizer

        content = AutoTokenizer.from_pretrained(str(path), local_files_only=True).backend_tokenizer.to_str()
    except ImportError:
        raise UsageError(f"--tokenizer {path}: it has no {TOKENIZER}, and transformers is not installed") from None
    except (AttributeError, OSError, ValueError) as error:
        raise UsageError(
            f"--tokenizer {path} cannot be read: {first_line(error)}",
            hint=f"Give a {TOKENIZER}, or a folder as transformers' save_pretrained writes it.",
        ) from error
    return str(content).encode()


def train_bpe(vocab_size: int, texts: Iterable[str]) -> Any:
    """Return a byte-level BPE of `vocab_size` tokens: 256 bytes, the end of a text, and merges by frequency."""
    library = import_tokenizers()
    least = 257
    if vocab_size < least:
        raise UsageError(f"--train-bpe {vocab_size}: at least {least}, one for each byte and one for the end of a text")
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def _training_texts(parts: list[CorpusPart], options: DocumentOptions) -> Iterator[str]:
    """Yield the training documents; of a large corpus those of evenly spaced parts."""
    training = [part for part in parts if part.split == "train"] or parts
    step = max(1, sum(part.bytes for part in training) // _TRAINED_BYTES)
    for part in training[::step]:
        for piece in part.pieces:
            yield from read_documents(piece, options)


def end_of(tokenizer: Any, job: TokenizeJob) -> int:
    """Return the token that ends a document."""
    names = [job.end] if job.end is not None else [*_configured_end(job.tokenizer), *_ENDS]
    for name in names:
        if (token := tokenizer.token_to_id(name)) is not None:
            return int(token)
    if job.end is not None:
        raise UsageError(f"--end {job.end}: the tokenizer has no such token")
    raise UsageError(
        f"the tokenizer has no token that is known to end a text; looked for {', '.join(names)}",
        hint="Name the one that follows each document: --end '<|endoftext|>'",
    )


def _configured_end(source: Path | None) -> list[str]:
    folder = None if source is None else source if source.is_dir() else source.parent
    if folder is None or not (path := folder / "tokenizer_config.json").is_file():
        return []
    end = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
    name = end.get("content") if isinstance(end, dict) else end
    return [name] if isinstance(name, str) else []


def other_input(folder: Path) -> UsageError:
    """Return the error for a folder that would be written over."""
    return UsageError(
        f"{folder} has token shards of other files or settings",
        hint="Give another --out, or --overwrite to replace them.",
    )
