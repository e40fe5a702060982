"""Questions in SQuAD's format: the official scores, windows with a stride, wrong answers and files, generated sets."""

from __future__ import annotations

import itertools
import json
import random

import pytest
import torch

from phalanx import PyTorchDDPTrainer
from phalanx.errors import DataError, UsageError
from phalanx.zoo.data import load
from phalanx.zoo.data.questions import AnswerScores, questions
from phalanx.zoo.data.squad import answer_scores, normalized, read_squad
from phalanx.zoo.models import build
from phalanx.zoo.pack.questions import QuestionsJob, write_questions, write_tokenizer

CONTEXT = (
    "The old lighthouse of Brann was built in 1851 by Maria Øster. It burned down in 1902, and Anna Lund rebuilt it."
)


def asked(key: str, question: str, *answers: str, at: int | None = None) -> dict:
    golds = [{"text": text, "answer_start": CONTEXT.find(text) if at is None else at} for text in answers]
    return {"id": key, "question": question, "answers": golds, "is_impossible": not answers}


def squad(path, *qas, context: str = CONTEXT):
    path.write_text(json.dumps({"data": [{"title": "t", "paragraphs": [{"context": context, "qas": list(qas)}]}]}))
    return path


@pytest.mark.parametrize(
    ("given", "golds", "exact", "f1"),
    [
        ("The Eiffel Tower!", ["Eiffel tower"], 1, 1),
        ("a  an the the-tower", ["thetower"], 1, 1),  # "-" goes before articles do: the word is "thetower"
        ("theatre", ["atre"], 0, 0),  # an article is a whole word
        ("in May 1902", ["May 1902"], 0, 2 * 2 / 5),
        ("May May", ["May"], 0, 2 * 1 / 3),  # words are counted, not only found
        ("red", ["blue", "dark red"], 0, 2 * 1 / 3),  # the best gold answer
        ("blue", ["blue", "dark red"], 1, 1),
        ("", ["red"], 0, 0),
        ("", [], 1, 1),  # an unanswerable question
        ("red", [], 0, 0),
        ("the", [], 1, 1),  # nothing is left of it
        ("red", ["the", "red"], 1, 1),  # a gold answer of which nothing is left does not count
        ("", ["the", "red"], 0, 0),
    ],
)
def test_scores_are_those_of_the_official_script(given, golds, exact, f1):
    assert answer_scores(given, golds) == pytest.approx((exact, f1))


def test_normalization_keeps_other_letters_and_white_space_of_one_kind():
    assert normalized("An  ÉCOLE,\tthe\nEnd.") == "école end"


def test_a_window_holds_question_context_and_answer(tmp_path):
    data = questions(
        "val", squad(tmp_path / "a.json", asked("1", "By whom?", "Maria Øster")), seq_len=160, val_fraction=0
    )
    assert len(data) == 0  # without held-out contexts nothing is for validation
    data = questions("train", tmp_path / "a.json", seq_len=160, val_fraction=0)
    (window,), sample = data.windows, data[0]
    first, last, begin, end = sample["labels"].tolist()
    assert data.answer_text(window, first, last) == "Maria Øster"
    assert data.answer_text(window, begin, end) == CONTEXT
    assert bytes(sample["input_ids"][first : last + 1].tolist()).decode() == "Maria Øster"
    assert sample["input_ids"][0] == sample["input_ids"][begin - 1] == sample["input_ids"][end + 1] == 256
    assert sample["token_type_ids"].nonzero().flatten().tolist() == list(range(begin, end + 2))
    assert sample["attention_mask"].sum() == end + 2


def test_long_contexts_become_windows_and_an_answer_outside_is_position_0(tmp_path):
    data = questions(
        "train", squad(tmp_path / "a.json", asked("1", "When?", "1902")), seq_len=48, stride=20, val_fraction=0
    )
    covered = set()
    for number, window in enumerate(data.windows):
        first, last, begin, end = data[number]["labels"].tolist()
        inside = data.answer_text(window, begin, end)
        assert ("1902" in inside) == (first > 0)
        assert not first or data.answer_text(window, first, last) == "1902"
        covered |= set(range(window.first, window.stop))
    starts = [window.first for window in data.windows]
    assert starts == list(range(0, 20 * len(starts), 20))
    assert covered == set(range(len(CONTEXT.encode())))


def scored(data, spans) -> dict[str, float]:
    """Return the scores of logits that prefer one (window, first, last, how much) each; others are 0."""
    logits = torch.zeros(len(data), data.seq_len, 2)
    for window, first, last, much in spans:
        logits[window, first, 0] = logits[window, last, 1] = much
    labels = torch.stack([data[number]["labels"] for number in range(len(data))])
    metric = data.metrics["answers"]
    return metric.combine(metric(logits, labels).double(), torch.arange(len(data)))


def test_the_best_span_of_all_windows_is_scored(tmp_path):
    data = questions(
        "train", squad(tmp_path / "a.json", asked("1", "When?", "1902")), seq_len=48, stride=20, val_fraction=0
    )
    right = [(n, *data[n]["labels"].tolist()[:2], 5.0) for n in range(len(data)) if data[n]["labels"][0]]
    assert scored(data, right) == {"exact": 1.0, "f1": 1.0}
    wrong = (0, 10, 12, 9.0)
    assert scored(data, [*right, wrong])["exact"] == 0.0
    outside = (0, 1, 3, 99.0)  # in the question
    backwards = (1, 20, 15, 4.0)
    assert scored(data, [*right, outside])["exact"] == 1.0
    assert scored(data, [right[0], backwards])["exact"] == 1.0


def test_a_span_is_not_longer_than_the_limit(tmp_path):
    data = questions("train", squad(tmp_path / "a.json", asked("1", "Who?", "Anna Lund")), seq_len=160, val_fraction=0)
    first, last = data[0]["labels"].tolist()[:2]
    data.metrics = {"answers": AnswerScores(data, longest=4)}
    assert scored(data, [(0, first, last, 5.0)])["exact"] == 0.0
    data.metrics = {"answers": AnswerScores(data, longest=9)}
    assert scored(data, [(0, first, last, 5.0)])["exact"] == 1.0


def test_no_answer_is_given_where_position_0_is_better_and_only_in_data_that_has_such(tmp_path):
    qas = [asked("1", "When?", "1902"), asked("2", "Which king?")]
    data = questions("train", squad(tmp_path / "a.json", *qas), seq_len=160, val_fraction=0)
    first, last = data[0]["labels"].tolist()[:2]
    assert data[1]["labels"].tolist()[:2] == [0, 0]
    right = scored(data, [(0, first, last, 5.0), (1, 0, 0, 5.0)])
    assert right == {"exact": 1.0, "f1": 1.0, "best_f1": 1.0, "best_f1_threshold": -10.0}
    wrong = scored(data, [(0, 0, 0, 5.0), (1, first, last, 5.0)])
    assert wrong == {"exact": 0.0, "f1": 0.0, "best_f1": 0.5, "best_f1_threshold": -11.0}
    answerable = questions("train", squad(tmp_path / "b.json", qas[0]), seq_len=160, val_fraction=0)
    assert scored(answerable, [(0, 0, 0, 9.0), (0, first, last, 5.0)])["exact"] == 1.0


@pytest.mark.parametrize(("threshold", "exact"), [(0.0, 0.5), (2.0, 1.0), (-8.0, 0.5)])
def test_a_threshold_decides_how_doubtful_an_answer_may_be(tmp_path, threshold, exact):
    qas = [asked("1", "When?", "1902"), asked("2", "Which king?")]
    data = questions("train", squad(tmp_path / "a.json", *qas), seq_len=160, val_fraction=0, null_threshold=threshold)
    first, last = data[0]["labels"].tolist()[:2]
    # Of no answer: 1 point above the right span of the first question, 4 above that of the second.
    found = scored(data, [(0, first, last, 2.0), (0, 0, 0, 2.5), (1, first, last, 2.0), (1, 0, 0, 4.0)])
    assert found["exact"] == exact
    assert (found["best_f1"], found["best_f1_threshold"]) == (1.0, 1.0)


def test_several_answers_are_ranked_with_their_shares(tmp_path):
    qas = [asked("1", "When?", "1902"), asked("2", "Which king?")]
    data = questions("train", squad(tmp_path / "a.json", *qas), seq_len=160, val_fraction=0, n_best=3)
    logits = torch.full((2, data.seq_len, 2), -9.0)
    right, king = data[0]["labels"].tolist()[:2], data[0]["labels"][2].item()
    logits[0, right[0], 0] = logits[0, right[1], 1] = 4.0
    logits[0, king, 0] = logits[0, king, 1] = 3.0
    logits[1, 0] = 5.0
    one, two = data.predictions(logits)
    assert one["answer"] == one["best"][0]["answer"] == "1902"
    assert [best["answer"] for best in one["best"]][1] == "T"  # a span of one byte at the context's begin
    assert one["best"][0]["probability"] == pytest.approx(torch.tensor([8.0, 6.0, -5.0]).softmax(0)[0].item(), abs=1e-4)
    assert two["answer"] == two["best"][0]["answer"] == ""
    assert two["no_answer"] == pytest.approx(10 + 18)
    assert len(two["best"]) == 3


@pytest.mark.parametrize("n_best", [1, 3])
def test_a_question_about_nothing_has_no_answer(tmp_path, n_best):
    path = squad(tmp_path / "a.json", {"id": "1", "question": "Who?", "answers": []}, context="")
    data = questions("train", path, seq_len=32, val_fraction=0, n_best=n_best)
    logits = torch.zeros(1, data.seq_len, 2)
    (row,) = data.predictions(logits)
    assert row["answer"] == ""
    metric = data.metrics["answers"]
    labels = torch.stack([data[0]["labels"]])
    assert metric.combine(metric(logits, labels).double(), torch.arange(1))["exact"] == 1.0


def test_a_question_counts_once_all_its_windows_are_measured(tmp_path):
    qas = [asked("1", "When?", "1851"), asked("2", "When?", "1902")]
    data = questions("train", squad(tmp_path / "a.json", *qas), seq_len=48, stride=20, val_fraction=0)
    metric, half = data.metrics["answers"], len(data) // 2
    rows = torch.zeros(len(data), 4).double()
    rows[:, 2:] = torch.stack([data[n]["labels"][2:] for n in range(len(data))])
    rows[0, 1], rows[0, 2:] = 1.0, torch.tensor(data[0]["labels"][:2].tolist())
    several = metric.combine(rows[: half + 1], torch.arange(half + 1))
    assert several == metric.combine(rows[:half], torch.arange(half))


def test_wrong_places_of_answers_are_found_counted_and_named(tmp_path):
    qas = [
        asked("fine", "When?", "1851"),
        asked("moved", "Who?", "Anna Lund", at=3),
        asked("lost", "Who?", "Zeus", at=3),
    ]
    data = questions("train", squad(tmp_path / "a.json", *qas), seq_len=160, val_fraction=0)
    assert [question.key for question in data.questions] == ["fine", "moved"]
    assert data.answer_text(data.windows[1], *data[1]["labels"].tolist()[:2]) == "Anna Lund"
    (note,) = data.notes
    assert "2 of 3 questions have answers that are not at answer_start (moved, lost)" in note
    assert "1 are elsewhere in the context, 1 are not in it and left out of training" in note
    (tmp_path / "dev.json").write_text((tmp_path / "a.json").read_text())
    kept = questions("val", tmp_path, seq_len=160)
    assert len(kept.questions) == 3, "an answer that is not in the text still counts in the score"
    assert "are scored" in kept.notes[0]


def test_the_nearest_occurrence_of_an_answer_is_taken(tmp_path):
    text = "red one, red two, red three"
    question = {"id": "1", "question": "?", "answers": [{"text": "red", "answer_start": 11}]}
    data = questions("train", squad(tmp_path / "a.json", question, context=text), seq_len=64, val_fraction=0)
    assert data[0]["labels"][0] - data[0]["labels"][2] == 9


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not in SQuAD's format: it cannot be read"),
        ("[1, 2", "is not in SQuAD's format: it cannot be read"),
        ('{"rows": []}', "is not in SQuAD's format: it has no 'data'"),
        ("[]", r"it has \[\] in place of an object with 'data'"),
        ('{"data": [{"paragraphs": [{"qas": []}]}]}', "paragraph 0 has no 'context'"),
        ('{"data": []}', "there is no question in it"),
    ],
)
def test_files_of_other_kinds_are_refused(tmp_path, content, message):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match=message):
        questions("train", tmp_path / "a.json")


@pytest.mark.parametrize(
    ("context", "question", "message"),
    [
        (CONTEXT, "x", "paragraph 0, in its qas, has 'x' in place of an object with 'id'"),
        (CONTEXT, {"question": "Who?"}, "paragraph 0, in its qas, has no 'id'"),
        (7, asked("q7", "Who?", "Anna Lund", at=0), "paragraph 0 has context = 7, expected a text"),
        (
            CONTEXT,
            {"id": "q7", "question": None, "answers": []},
            "the question q7 has question = None, expected a text",
        ),
        (CONTEXT, {"id": "q7", "question": "Who?"}, "the question q7 has no 'answers'"),
        (
            CONTEXT,
            {"id": "q7", "question": "?", "answers": ["x"]},
            "the question q7 has 'x' in place of an object with",
        ),
        (
            CONTEXT,
            {"id": "q7", "question": "?", "answers": [{"text": None, "answer_start": 0}]},
            "the question q7 has text = None, expected a text",
        ),
        (
            CONTEXT,
            {"id": "q7", "question": "?", "answers": {"text": ["a"], "answer_start": []}},
            "the question q7 has 1 texts of answers, and 0 of answer_start",
        ),
    ],
)
def test_malformed_questions_are_named(tmp_path, context, question, message):
    with pytest.raises(DataError, match=message):
        questions("train", squad(tmp_path / "a.json", question, context=context))


def test_answers_may_be_lists_as_hugging_face_has_them(tmp_path):
    given = [asked("a", "When?", "1851"), asked("b", "Why?")]
    lists = [
        {**each, "answers": {key: [answer[key] for answer in each["answers"]] for key in ("text", "answer_start")}}
        for each in given
    ]
    for each in lists:
        each.pop("is_impossible", None)
    expected, found = read_squad([squad(tmp_path / "a.json", *given)]), read_squad([squad(tmp_path / "b.json", *lists)])
    assert found == expected


def test_bad_options_are_said(tmp_path):
    with pytest.raises(DataError, match=r"has no \.json file with questions"):
        questions("train", tmp_path)
    with pytest.raises(UsageError, match="needs a file in SQuAD's format"):
        questions("train")
    path = squad(tmp_path / "a.json", asked("long-one", "Why " * 20, "1902"))
    with pytest.raises(UsageError, match="stride = 0"):
        questions("train", path, stride=0)
    with pytest.raises(DataError, match="the question long-one has 80 tokens, which leaves less than half of a window"):
        questions("train", path, seq_len=100, val_fraction=0)


def test_generated_sets_are_clear_repeatable_and_have_unseen_names(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_questions(QuestionsJob(out=tmp_path / name, count=300, unanswerable=0.2, seed=seed))
    files = {name: (tmp_path / name / "train.json").read_bytes() for name in "abc"}
    assert files["a"] == files["b"] != files["c"]
    train, val = load(str(tmp_path / "a"), seq_len=64), load(str(tmp_path / "a"), "val", seq_len=64)
    assert (len(train.questions), len(val.questions)) == (300, 30)
    assert not train.notes
    for data in (train, val):
        for number, window in enumerate(data.windows):
            first, last = data[number]["labels"].tolist()[:2]
            golds = data.questions[window.question].answers
            assert not first or data.answer_text(window, first, last) == golds[0].text
    share = sum(not question.answers for question in train.questions) / 300
    assert 0.1 < share < 0.3

    def people(data):
        words = " ".join(data.contexts).replace(".", "").split()
        return {pair for pair in itertools.pairwise(words) if all(word.istitle() for word in pair)}

    assert people(val) - people(train), "some pairs of names are in the validation split alone"
    with pytest.raises(UsageError, match="is not empty"):
        write_questions(QuestionsJob(out=tmp_path / "a", count=300))
    with pytest.raises(UsageError, match="count is 10 or more"):
        write_questions(QuestionsJob(out=tmp_path / "d", count=3))


def write_small_set(folder) -> None:
    """Write contexts of two facts in any order, asked for by their kind."""
    draw = random.Random(0)
    kinds = {"colour": ["red", "green", "dark blue", "white"], "size": ["small", "very big", "tiny", "wide"]}
    for name, count in (("train", 600), ("dev", 60)):
        paragraphs = []
        for number in range(count):
            facts = {kind: draw.choice(words) for kind, words in kinds.items()}
            order = draw.sample(list(facts), 2)
            context = " ".join(f"its {kind} is {facts[kind]}." for kind in order)
            asked = draw.choice(order)
            answers = [{"text": facts[asked], "answer_start": context.index(facts[asked])}]
            qas = [{"id": f"{name}-{number}", "question": f"which {asked}?", "answers": answers}]
            paragraphs.append({"context": context, "qas": qas})
        (folder / f"{name}.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
        texts = [f"{each['context']} {each['qas'][0]['question']}" for each in paragraphs]
    write_tokenizer(folder / "tokenizer", texts)


def test_answers_are_learned(tmp_path):
    """A smaller size of what docs/applications/questions.md shows."""
    write_small_set(tmp_path)
    train, val = (questions(split, tmp_path, seq_len=32) for split in ("train", "val"))
    torch.manual_seed(0)
    model = build("bert", task="qa", vocab_size=train.vocab_size, hidden=32, ffn_hidden=64)
    settings = {"learning_rate": 5e-3, "lr_schedule": "cosine", "warmup": 10}
    trainer = PyTorchDDPTrainer(model, device="cpu", batch_size=32, max_steps=120, **settings)
    before = trainer.evaluate(val)["f1"]
    trainer.fit(train, run_dir=tmp_path / "run")
    after = trainer.evaluate(val)
    assert before < 0.4
    assert after["f1"] > 0.9, (before, after)
