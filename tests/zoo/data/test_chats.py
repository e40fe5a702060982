"""Conversations as data: layouts of rows, templates, packing, pairs of answers, rated answers and prompts."""

from __future__ import annotations

import json

import pytest
import torch

from phalanx.errors import DataError, UsageError
from phalanx.zoo.data import load
from phalanx.zoo.data.chat_template import PLAIN, read_template
from phalanx.zoo.data.chats import messages_of
from phalanx.zoo.data.prompts import PromptCode

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
UNMARKED = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
FORGETS = UNMARKED.replace("{{ m['content']", "{% if loop.last %}{{ '<think></think>' }}{% endif %}{{ m['content']", 1)
"""As Qwen3's: only the last answer shows what was thought."""
THINKS = UNMARKED.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>\n' }}")


def said(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


@pytest.fixture
def folder(tmp_path):
    """The folder of a byte-level tokenizer with a chat template that it is given."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    def save(template: str | None, *merges: tuple[str, str], trims: bool = False, **special: str) -> str:
        pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
        code = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, list(merges)))
        code.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not merges)
        code.decoder, code.post_processor = decoders.ByteLevel(), processors.ByteLevel(trim_offsets=trims)
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=code, eos_token="<|im_end|>", **special)
        fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
        fast.chat_template = template
        fast.save_pretrained(tmp_path / "tokenizer")
        return str(tmp_path / "tokenizer")

    return save


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def learned(folder: str, *texts: str, template: str | None = None) -> str:
    """Return the letters of a conversation that are learned; a bar between turns."""
    form = read_template(folder, template)
    encoded = form.encode([said(*texts)])[0]
    decode = form._tokenizer.decode
    return "|".join(decode(encoded.tokens[begin:end]) for begin, end in encoded.turns)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": said("Hi", "Yes"), "prompt": None},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]},
        {"prompt": "Hi", "completion": "Yes"},
        {"prompt": said("Hi"), "completion": [{"role": "assistant", "content": "Yes"}]},
        {"instruction": "Hi", "input": "", "output": "Yes"},
    ],
)
def test_every_layout_is_the_same_conversation(row):
    assert messages_of(row, 0) == said("Hi", "Yes")


def test_alpacas_input_follows_the_instruction():
    row = {"instruction": "Add", "input": "1 2", "output": "3"}
    assert messages_of(row, 0) == said("Add\n\n1 2", "3")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a"}, "row 7 is not a conversation; its columns: text"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "row 7: .* is not a message"),
        ({"messages": ["a"]}, "row 7: 'a' is not a message"),
        ({"instruction": 5, "output": "x"}, "row 7: 5 is not a message"),
        ({"instruction": "a", "input": 0, "output": "x"}, "row 7: 0 is not a message"),
    ],
)
def test_rows_that_are_not_conversations_are_named(row, message):
    with pytest.raises(DataError, match=message):
        messages_of(row, 7)


def test_bytes_learn_the_answers_and_their_ends(tmp_path):
    root = write(tmp_path / "a.jsonl", [{"messages": said("a", "xy", "b", "z")}])
    data = load("chats", root=root, template="plain", seq_len=48, val_fraction=0, packing="none")
    tokens, targets = data[0]
    text = b"user:\na\x03assistant:\nxy\x03user:\nb\x03assistant:\nz\x03"
    assert bytes(tokens[: len(text) - 1].tolist()) == text[:-1]
    assert bytes(targets[targets >= 0].tolist()) == b"xy\x03z\x03"
    assert targets[18:21].tolist() == list(b"xy\x03")  # each where the token before it is read
    everything = load("chats", root=root, template="plain", seq_len=48, val_fraction=0, train_on="all")[0]
    assert bytes(everything["targets"][: len(text) - 1].tolist()) == text[1:]


@pytest.mark.parametrize("template", [CHATML, UNMARKED])
def test_answers_are_found_with_and_without_marks(folder, template):
    texts = ("Hé?", "Ja\n", "b", "cd")
    path = folder(template)
    assert learned(path, *texts) == "Ja\n<|im_end|>\n|cd<|im_end|>\n"
    form = read_template(path, None)
    whole = form._tokenizer.apply_chat_template(said(*texts), tokenize=True, return_dict=False)
    assert list(form.encode([said(*texts)])[0].tokens) == list(whole)
    assert form.notes == ()


def test_the_plain_template_is_the_same_for_bytes_and_tokenizers(folder):
    path = folder(None)
    assert learned(path, "a", "xy", template="plain") == "xy<|im_end|>"
    form, plain = read_template(path, "plain"), read_template(None, "plain")
    text = form._tokenizer.decode(form.ask(said("a")))
    assert text.replace("<|im_end|>", "\x03").encode() == bytes(plain.ask(said("a")))


@pytest.mark.parametrize("trims", [True, False])
@pytest.mark.parametrize("separator", ["\\n", " "])
def test_an_answer_is_learned_by_the_tokens_that_follow_the_question(folder, separator, trims):
    """Tokens such as " Y" would begin within the invitation, with which a model is asked."""
    template = PLAIN.replace("\\n", separator)
    path = folder(template, ("Ġ", "Y"), ("Ċ", "Y"), ("s", "."), trims=trims)
    assert learned(path, "Yes", "Yes.", "Yes", "Y") == "Yes.<|im_end|>|Y<|im_end|>"
    form = read_template(path, None)
    tokens, turns = form.encode([said("Yes", "Yes.")])[0]
    assert tokens[: turns[0][0]] == form.ask(said("Yes"))


def test_a_token_across_the_end_of_a_turn_is_learned(folder):
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert learned(folder(template, ("b", "c")), "a", "b", "c", "d") == "bc|d"


def test_answers_end_with_special_tokens_but_not_with_unknown_words(folder):
    path = folder(CHATML, unk_token="<unk>", pad_token="<pad>", mask_token="<mask>")
    form = read_template(path, None)
    assert set(form._tokenizer.convert_ids_to_tokens(form.end_tokens)) == {"<|im_end|>", "<|im_start|>"}
    padded = read_template(folder(CHATML, pad_token="<|im_end|>"), None)
    assert padded._tokenizer.eos_token_id in padded.end_tokens


def test_a_template_that_changes_earlier_answers_learns_the_last_one_and_says_so(folder):
    form = read_template(folder(FORGETS), None)
    encoded = form.encode([said("a", "b", "c", "d"), said("a", "b")])
    assert [len(each.turns) for each in encoded] == [1, 1]
    assert learned(folder(FORGETS), "a", "b", "c", "d") == "<think></think>d<|im_end|>\n"
    assert "of 1 conversations only the answers are learned that stay as they are" in form.notes[0]


def test_an_invitation_that_answers_do_not_have_is_left_out(folder):
    assert learned(folder(THINKS), "a", "b", "c", "d") == "b<|im_end|>\n|d<|im_end|>\n"


def test_a_template_without_any_stable_turn_is_refused(folder):
    path = folder("{{ messages|length }}{% for m in messages %}{{ m['content'] }}{% endfor %}")
    with pytest.raises(DataError, match="changes earlier turns") as caught:
        read_template(path, None).encode([said("a", "b")])
    assert "{% generation %}" in str(caught.value.hint)


def test_a_template_that_refuses_roles_is_quoted(folder):
    path = folder("{{ raise_exception('no such role') }}")
    with pytest.raises(DataError, match="does not take a conversation of user, assistant: no such role"):
        read_template(path, None).encode([said("a", "b")])


def test_a_missing_template_is_named_with_what_to_write(folder, tmp_path):
    for given in ((None, None), (folder(None), None)):
        with pytest.raises(UsageError, match="the chat template is missing") as caught:
            read_template(*given)
        assert "data.template=plain" in caught.value.hint
    with pytest.raises(UsageError, match="neither 'plain' nor a file"):
        read_template(folder(None), "chatml")
    file = tmp_path / "own.jinja"
    file.write_text(PLAIN)
    assert learned(folder(CHATML), "a", "xy", template=str(file)) == "xy<|im_end|>"


def test_long_conversations_end_with_a_whole_answer_and_are_counted(tmp_path):
    rows = [
        {"messages": said("a", "b", "c", "d" * 99)},  # ends after b
        {"messages": said("a", "e" * 99)},  # ends within the first answer
        {"messages": said("q" * 99, "f")},  # no answer begins
        {"messages": said("a")},
        {"messages": said("a", "g")},
    ]
    data = load("chats", root=write(tmp_path / "a.jsonl", rows), template="plain", seq_len=40, val_fraction=0)
    texts = [bytes(targets[targets >= 0].tolist()) for targets in data.gather(torch.arange(len(data)))["targets"]]
    found = b"".join(sorted(texts, key=len))
    assert found.count(b"b\x03") == 1
    assert found.count(b"e") == 41 - len("user:.a.assistant:.")
    assert b"d" not in found
    assert b"f" not in found
    assert (
        data.notes[1] == "3 conversations are longer than seq_len = 40 and cut, 1 of them skipped: not even the first "
        "answer begins there"
    )
    assert data.notes[2] == "1 conversation (row 3) skipped: the assistant says nothing there"


def test_conversations_without_anything_to_learn_are_named(folder, tmp_path):
    """The template marks contents alone: the empty answer of row 1 has no tokens."""
    template = CHATML.replace("m['content'] + '<|im_end|>\n' }}{% endgen", "m['content'] }}{% endgen")
    rows = [{"messages": said("a", "b")}, {"messages": said("a", "")}, {"messages": []}]
    root = write(tmp_path / "a.jsonl", rows)
    data = load("chats", root=root, tokenizer=folder(template), seq_len=40, val_fraction=0)
    assert len(data) == 1
    assert data.notes[1:] == (
        "1 conversation (row 2) skipped: the assistant says nothing there",
        "1 conversation (row 1) skipped: the template marks no answer there",
    )


def test_packed_conversations_are_kept_apart_and_each_is_there_once(tmp_path):
    rows = [{"messages": said("a" * (number % 7), f"{number:02d}")} for number in range(40)]
    data = load("chats", root=write(tmp_path / "a.jsonl", rows), template="plain", seq_len=64, val_fraction=0)
    batch = data.gather(torch.arange(len(data)))
    assert len(data) < 30
    learned = bytes(batch["targets"][batch["targets"] >= 0].tolist()).split(b"\x03")[:-1]
    assert sorted(learned) == [f"{number:02d}".encode() for number in range(40)]
    starts = batch["positions"] == 0
    first = batch["tokens"][starts & (batch["documents"] >= 0)]
    assert bytes(first.tolist()) == b"u" * 40


def test_a_model_of_transformers_gets_labels_of_its_own_kind(tmp_path):
    class TheirModel(torch.nn.Module):
        def forward(self, input_ids, attention_mask=None, labels=None):
            return input_ids

    data = load(
        "chats", root=write(tmp_path / "a.jsonl", [{"messages": said("a", "xy")}]), template="plain", seq_len=24
    )
    data.fit_to(TheirModel())
    batch = data[0]
    text = b"user:\na\x03assistant:\nxy\x03"
    assert bytes(batch["input_ids"][: len(text)].tolist()) == text
    assert batch["attention_mask"].tolist() == [1] * len(text) + [0] * (25 - len(text))
    assert bytes(batch["labels"][batch["labels"] >= 0].tolist()) == b"xy\x03"
    assert torch.equal(batch["labels"][batch["labels"] >= 0], batch["input_ids"][batch["labels"] >= 0])


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "chosen": "yes", "rejected": "yet"},
        {"prompt": said("a"), "chosen": said("a", "yes")[1:], "rejected": said("a", "yet")[1:]},
        {"chosen": said("a", "yes"), "rejected": said("a", "yet")},
    ],
)
def test_pairs_count_in_the_answers_that_differ(tmp_path, row):
    data = load("preferences", root=write(tmp_path / "a.jsonl", [row]), template="plain", val_fraction=0)
    pair = data[0]
    answers = [bytes(side[side >= 0].tolist()) for side in pair["answers"]]
    assert answers == [b"yes\x03", b"yet\x03"]
    assert bytes(pair["tokens"][0].tolist()) == b"user:\na\x03assistant:\nyes"


def test_pairs_without_a_difference_are_skipped_and_named(tmp_path):
    rows = [{"prompt": "a", "chosen": "b", "rejected": "b"}, {"prompt": "q" * 50, "chosen": "b", "rejected": "c"}]
    rows += [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    data = load("preferences", root=write(tmp_path / "a.jsonl", rows), template="plain", seq_len=30, val_fraction=0)
    assert len(data) == 1
    assert data.notes[1].startswith("2 pairs (rows 0, 1) skipped: the two answers are the same")
    rows = [{"prompt": "a", "chosen": "b", "rejected": ""}, {"prompt": "a", "chosen": "b" * 9, "rejected": "c"}]
    data = load("preferences", root=write(tmp_path / "c.jsonl", rows), template="plain", seq_len=22, val_fraction=0)
    assert data.notes[1:] == (
        "1 pair (row 0) skipped: an answer is empty",
        "1 pair (row 1) cut: longer than seq_len = 22",
    )
    with pytest.raises(DataError, match="row 0 is not a pair of answers; its columns: prompt"):
        load("preferences", root=write(tmp_path / "b.jsonl", [{"prompt": "a"}]), template="plain")


def test_answers_in_the_prompt_of_a_pair_do_not_count(tmp_path):
    row = {"prompt": said("a", "b", "c"), "chosen": "yes", "rejected": "no"}
    data = load("preferences", root=write(tmp_path / "a.jsonl", [row]), template="plain", val_fraction=0)
    assert [bytes(side[side >= 0].tolist()) for side in data[0]["answers"]] == [b"yes\x03", b"no\x03"]


def of(sample: dict[str, torch.Tensor], prefix: str = "") -> tuple[bytes, bytes]:
    """Return the text of a rated answer up to its last token, and what counts of it."""
    tokens, answers = sample[f"{prefix}tokens"], sample[f"{prefix}answers"]
    return bytes(token for token in tokens.tolist() if token), bytes(answers[answers >= 0].tolist())


def test_rated_answers_stand_beside_the_answer_of_another_row(tmp_path):
    rows = [
        {"prompt": "a", "completion": "yes", "label": True},
        {"prompt": said("b"), "completion": said("b", "no")[1:], "label": False},
        {"prompt": "c", "chosen": "good", "rejected": "bad"},
    ]
    data = load("ratings", root=write(tmp_path / "a.jsonl", rows), template="plain", val_fraction=0)
    assert [data[number]["desirable"].item() for number in range(4)] == [True, False, True, False]
    assert of(data[0]) == (b"user:\na\x03assistant:\nyes", b"yes\x03")
    assert of(data[0], "other_") == (b"user:\na\x03assistant:\nno", b"no\x03")
    assert of(data[1], "other_") == (b"user:\nb\x03assistant:\ngood", b"good\x03")
    assert of(data[3]) == (b"user:\nc\x03assistant:\nbad", b"bad\x03")
    assert of(data[3], "other_") == (b"user:\nc\x03assistant:\nyes", b"yes\x03")
    assert data.notes == ("4 answers of at most 23 tokens, 2 of them desirable",)


def test_rated_answers_that_are_empty_or_long_are_counted(tmp_path):
    rows = [{"prompt": "a", "completion": text, "label": True} for text in ("b", "", "c" * 20)]
    rows += [{"prompt": "q" * 50, "completion": "b", "label": 0}, {"prompt": "a", "completion": "d", "label": 1}]
    data = load("ratings", root=write(tmp_path / "a.jsonl", rows), template="plain", seq_len=24, val_fraction=0)
    assert len(data) == 3
    assert data.notes[1:] == (
        "1 row (row 1) skipped: the answer is empty",
        "1 row (row 3) skipped: the answer begins after seq_len = 24",
        "2 rows (rows 2, 3) cut: longer than seq_len = 24",
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a"}, "row 0 is not a rated answer; its columns: prompt"),
        ({"prompt": "a", "completion": "b", "label": "good"}, "label = 'good': expected true"),
        ({"completion": said("a"), "label": True}, "the answer begins with a message of 'user'"),
    ],
)
def test_rows_that_are_no_rated_answers_are_named(tmp_path, row, message):
    with pytest.raises(DataError, match=message):
        load("ratings", root=write(tmp_path / "a.jsonl", [row]), template="plain", val_fraction=0)


def test_prompts_are_asked_by_the_template_and_keep_their_rows(tmp_path):
    rows = [{"prompt": "2+3?", "sum": 5}, {"prompt": said("a", "b", "c"), "sum": None}]
    root = write(tmp_path / "a.jsonl", rows)
    data = load("prompts", root=root, template="plain", val_fraction=0)
    batch = data.gather(torch.tensor([0, 1]))
    asked = [bytes(token for token in prompt if token >= 0) for prompt in batch["prompts"].tolist()]
    assert asked == [b"user:\n2+3?\x03assistant:\n", b"user:\na\x03assistant:\nb\x03user:\nc\x03assistant:\n"]
    assert [json.loads(bytes(row).rstrip(b"\0")) for row in batch["rows"].tolist()] == rows
    plain = load("prompts", root=write(tmp_path / "b.jsonl", rows[:1]), template="none", val_fraction=0)
    assert bytes(plain[0]["prompts"].tolist()) == b"2+3?"
    with pytest.raises(UsageError, match="template = 'none' continues texts"):
        load("prompts", root=root, template="none", val_fraction=0)
    short = load("prompts", root=root, template="plain", seq_len=24, val_fraction=0)
    assert short.notes[1] == "1 prompt (row 1) skipped: longer than seq_len = 24"
    with pytest.raises(DataError, match="row 0 has no prompt; its columns: text"):
        load("prompts", root=write(tmp_path / "c.jsonl", [{"text": "a"}]), template="plain", val_fraction=0)


def test_prompts_of_a_tokenizer_end_with_its_end_token(folder):
    code = PromptCode(folder(CHATML), None)
    assert code.decode(code.encode("hi")).endswith("assistant\n")
    assert [code._tokenizer.decode([token]) for token in code.end_tokens] == ["<|im_end|>"] or len(code.end_tokens) == 2
    plain = PromptCode(folder(None), "none")
    assert plain.decode(plain.encode("hi")) == "hi"
    assert plain.end_tokens == {plain._tokenizer.eos_token_id}
