"""A generated set of questions in SQuAD's format: small stories of people, places, objects and times.

A context has one fact of several kinds, in any order. People, places, objects and times are in more than one of them:
which of them is the answer follows from the verb and the question word. A third of the pairs of first and last names is
in the validation split alone.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.errors import UsageError
from phalanx.host.files import replace_file
from phalanx.zoo.data.token_shards import TOKENIZER, import_tokenizers

_WORDS = {
    "first": "Anna Boris Clara David Elena Farid Greta Hugo Irma Jonas Kira Leon Maya Nils Olga Pavel",
    "last": "Abbot Bloom Costa Drake Evans Fonte Grant Hobbs Ivory Jones Klein Lopez Moore North Olsen Price",
    "place": "library market museum station harbour garden theatre bakery school castle bridge forest",
    "thing": "lamp book coin ring letter basket clock violin ladder mirror kettle drum",
    "colour": "red green blue black white golden",
}
_FIRST, _LAST, _PLACES, _THINGS, _COLOURS = (words.split() for words in _WORDS.values())
_TIMES = ["at noon", "at dawn", "at midnight", "on Monday", "on Friday", "on Sunday", "in May", "in winter"]
_FACTS = (3, 5)
"""The fewest and the most facts of a context: at least one kind is left out."""
_PER_CONTEXT = 3
_VOCABULARY = 1000


class FactKind(NamedTuple):
    """A kind of fact: its sentence, and the question for each of its slots that can be asked for."""

    sentence: str
    questions: dict[str, str]


KINDS = (
    FactKind("{person} lives in {place}.", {"place": "Where does {person} live?", "person": "Who lives in {place}?"}),
    FactKind(
        "{person} lost {thing} in {place} {time}.",
        {
            "thing": "What did {person} lose in {place}?",
            "place": "Where did {person} lose {thing}?",
            "time": "When did {person} lose {thing}?",
            "person": "Who lost {thing} {time}?",
        },
    ),
    FactKind(
        "{person} gave {thing} to {other}.",
        {
            "thing": "What did {person} give to {other}?",
            "other": "Who got {thing} from {person}?",
            "person": "Who gave {thing} to {other}?",
        },
    ),
    FactKind(
        "{person} met {other} {time}.",
        {"other": "Who did {person} meet {time}?", "time": "When did {person} meet {other}?"},
    ),
    FactKind(
        "{person} went to {place} {time}.",
        {"place": "Where did {person} go {time}?", "time": "When did {person} go to {place}?"},
    ),
    FactKind("{person} wants {thing}.", {"thing": "What does {person} want?", "person": "Who wants {thing}?"}),
)


class Fact(NamedTuple):
    """A kind, the words of its slots, and where each of them begins in the context."""

    kind: FactKind
    words: dict[str, str]
    places: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionsJob:
    """What is asked for: `count` training questions, and a tenth of it for validation."""

    out: Path
    count: int = 6000
    unanswerable: float = 0.0
    seed: int = 0


def write_questions(job: QuestionsJob) -> dict[str, int]:
    """Write train.json, dev.json, the contexts as texts/ and a tokenizer/ of their words; return the questions."""
    if job.count < 10 or not 0 <= job.unanswerable < 1 or job.seed < 0:
        raise UsageError(
            f"count = {job.count}, unanswerable = {job.unanswerable}, seed = {job.seed}: count is 10 or more, "
            "unanswerable is a share below 1, seed is 0 or more"
        )
    if job.out.exists() and any(job.out.iterdir()):
        raise UsageError(f"--out {job.out} is not empty", hint="Give another folder, or empty this one.")
    (job.out / "texts").mkdir(parents=True, exist_ok=True)
    counts = {"train": job.count, "dev": job.count // 10}
    texts: list[str] = []
    for split, count in counts.items():
        paragraphs = _paragraphs(job, split, count)
        version = "2.0" if job.unanswerable else "1.1"
        document = {"version": version, "data": [{"title": split, "paragraphs": paragraphs}]}
        replace_file(job.out / f"{split}.json", json.dumps(document))
        contexts = [paragraph["context"] for paragraph in paragraphs]
        replace_file(job.out / "texts" / f"{split}.txt", "\n".join(contexts) + "\n")
        texts += [*contexts, *(item["question"] for paragraph in paragraphs for item in paragraph["qas"])]
    write_tokenizer(job.out / "tokenizer", texts)
    return counts


def _paragraphs(job: QuestionsJob, split: str, count: int) -> list[dict[str, Any]]:
    draw = random.Random(f"{job.seed} {split}")
    pairs = [f"{first} {last}" for first in _FIRST for last in _LAST]
    random.Random(job.seed).shuffle(pairs)
    seen_pairs, unseen = pairs[len(pairs) // 3 :], pairs[: len(pairs) // 3]
    paragraphs: list[dict[str, Any]] = []
    drawn = 0
    while drawn < count:
        people = draw.sample(seen_pairs, 3) if split == "train" else draw.sample(seen_pairs, 1) + draw.sample(unseen, 2)
        context, facts = _story(draw, people)
        number = min(_PER_CONTEXT, count - drawn)
        qas = [_question(draw, facts, job.unanswerable, f"{split}-{drawn + index}") for index in range(number)]
        paragraphs.append({"context": context, "qas": qas})
        drawn += number
    return paragraphs


def _story(draw: random.Random, people: list[str]) -> tuple[str, list[Fact]]:
    """Return a context, and its facts."""
    context = ""
    facts: list[Fact] = []
    for kind in draw.sample(KINDS, draw.randint(*_FACTS)):
        person, other = draw.sample(people, 2)
        words = {"person": person, "other": other, "time": draw.choice(_TIMES)}
        words |= {
            "thing": f"the {draw.choice(_COLOURS)} {draw.choice(_THINGS)}",
            "place": f"the {draw.choice(_PLACES)}",
        }
        context += " " if context else ""
        before = {slot: kind.sentence.partition(f"{{{slot}}}")[0].format(**words) for slot in words}
        begins = {slot: len(context) + len(text) for slot, text in before.items()}
        facts.append(Fact(kind, words, begins))
        context += kind.sentence.format(**words)
    return context, facts


def _question(draw: random.Random, facts: list[Fact], unanswerable: float, key: str) -> dict[str, Any]:
    """Return a question about one of the facts, or about a kind of fact that is not in the context."""
    fact = draw.choice(facts)
    is_impossible = draw.random() < unanswerable
    others = [kind for kind in KINDS if all(kind is not known_fact.kind for known_fact in facts)]
    kind = draw.choice(others) if is_impossible else fact.kind
    slot = draw.choice(list(kind.questions))
    answers = [] if is_impossible else [{"text": fact.words[slot], "answer_start": fact.places[slot]}]
    question = kind.questions[slot].format(**fact.words)
    return {"id": key, "question": question, "is_impossible": is_impossible, "answers": answers}


def write_tokenizer(folder: Path, texts: list[str]) -> None:
    """Write a WordPiece of the words of texts as transformers reads it, for masked texts as well."""
    library = import_tokenizers()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    special |= {"mask_token": "[MASK]"}
    tokenizer = library.Tokenizer(library.models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = library.normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = library.decoders.WordPiece()
    trainer = library.trainers.WordPieceTrainer(
        vocab_size=_VOCABULARY, special_tokens=list(special.values()), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / TOKENIZER))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    replace_file(folder / "tokenizer_config.json", json.dumps(config, indent=2))
