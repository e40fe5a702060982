"""`phalanx data tokenize`: what it reads, the tokenizer it trains, going on after a stop, and input that is wrong."""

from __future__ import annotations

import json
import sys
import sysconfig
from itertools import pairwise
from pathlib import Path

import numpy as np
import programs
import pytest
from command import COMMAND, ROOT, clean_environment, phalanx

from phalanx.errors import DataError, UsageError
from phalanx.zoo.data.token_shards import TokenManifest, TokenStream, read_tokenizer
from phalanx.zoo.pack import tokenize as tool
from phalanx.zoo.pack.documents import DocumentOptions, plan_parts, read_documents
from phalanx.zoo.pack.tokenize import tokenize
from phalanx.zoo.pack.tokenizer import END_OF_TEXT, TokenizeJob, train_bpe

LIBRARY = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
SOURCES = [path.read_text() for path in LIBRARY if path.stat().st_size < 20_000][:25]


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory) -> Path:
    """A byte-level BPE of 256 bytes, the end of a text and 500 merges, trained on Python's own library."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_bpe(757, SOURCES).save(str(path))
    return path


def write_lines(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text, "id": 3}) + "\n" for text in texts))
    return path


def make(inputs: Path, out: Path, tokenizer: Path | None, **options) -> tuple[TokenManifest, list[str]]:
    said: list[str] = []
    job = TokenizeJob(inputs=(str(inputs),), out=out, tokenizer=tokenizer, **{"workers": 1, **options})
    return tokenize(job, said.append), said


def texts_of(manifest: TokenManifest, split: str = "train") -> list[str]:
    """Return the documents of shards as texts, without what ends them."""
    tokenizer = read_tokenizer(manifest.folder / "tokenizer.json")
    stream = TokenStream(manifest, [shard for shard in manifest.shards if shard.split == split])
    starts = stream.document_starts()
    found = [stream.read(start, end - start).tolist() for start, end in pairwise(starts)]
    assert all(tokens[-1] == manifest.end for tokens in found)
    return [tokenizer.decode(tokens[:-1]) for tokens in found]


def test_a_tokenizer_trained_here_gives_every_text_back(tmp_path):
    odd = ["naïve ☃ \x00\r\n", f"a text about {END_OF_TEXT} itself"]
    corpus = write_lines(tmp_path / "code.jsonl", [*SOURCES, "", *odd])
    manifest, said = make(corpus, tmp_path / "out", None, train_bpe=757)
    assert texts_of(manifest) == [*SOURCES, *odd]
    assert (manifest.vocab_size, manifest.dtype, manifest.total("empty")) == (757, "uint16", 1)
    assert read_tokenizer(tmp_path / "out" / "tokenizer.json").id_to_token(manifest.end) == END_OF_TEXT
    assert "757 tokens of byte-level BPE, trained in" in said[0]
    assert "documents, 1 empty left out" in said[-1]
    assert manifest.total("tokens") < 0.6 * sum(map(len, SOURCES))  # merges do merge
    assert TokenManifest.read(tmp_path / "out") == manifest


@pytest.mark.parametrize("part_bytes", [1, 777, 10_000, 1 << 30])
def test_lines_are_read_once_wherever_the_parts_are_cut(tmp_path, part_bytes):
    texts = [f"line {number} " * (number % 7) for number in range(60)]
    corpus = write_lines(tmp_path / "a.jsonl", texts)
    corpus.write_text(corpus.read_text().replace("\n", "\n\n", 3).rstrip("\n"))  # blank lines, no newline at the end
    parts = plan_parts([str(corpus)], part_bytes)
    found = [text for part in parts for piece in part.pieces for text in read_documents(piece, DocumentOptions())]
    assert found == texts
    assert sum(part.bytes for part in parts) == corpus.stat().st_size


def test_every_kind_of_file_is_read_and_names_decide_the_split(tmp_path, tokenizer_file):
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet

    folder = tmp_path / "corpus"
    write_lines(folder / "a.jsonl", ["from lines"])
    (folder / "b.txt").write_text("one\ndocument\n\nin a text")
    table = pyarrow.table({"text": ["first row", None, "third row"], "id": [1, 2, 3]})
    pyarrow.parquet.write_table(table, folder / "c.parquet", row_group_size=1)
    with pyarrow.ipc.new_stream(str(folder / "d.arrow"), table.schema) as stream:
        stream.write_table(table)
    write_lines(folder / "val" / "e.jsonl", ["held out"])
    (folder / "notes.xyz").write_text("not read")
    (folder / ".hidden.txt").write_text("not read")
    rows = ["first row", "third row"]
    manifest, _ = make(folder, tmp_path / "out", tokenizer_file)
    assert texts_of(manifest) == ["from lines", "one\ndocument\n\nin a text", *rows, *rows]
    assert texts_of(manifest, "val") == ["held out"]
    assert manifest.total("empty") == 2
    manifest, _ = make(folder / "b.txt", tmp_path / "cut", tokenizer_file, options=DocumentOptions(paragraphs=True))
    assert texts_of(manifest) == ["one\ndocument\n", "in a text"]


def test_several_processes_write_the_same_bytes(tmp_path, tokenizer_file):
    corpus = write_lines(tmp_path / "code.jsonl", SOURCES[:8])
    one, _ = make(corpus, tmp_path / "one", tokenizer_file, part_bytes=20_000)
    # A program of its own: Python leaves a process for semaphores until the program ends.
    words = ["tokenize", corpus, "--out", "two", "--tokenizer", tokenizer_file, "--workers", 2, "--shard-mb", 0.02]
    command = [*COMMAND, "data", *map(str, words)]
    environment = {**clean_environment(), "PYTHONPATH": str(ROOT)}
    programs.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=120)
    two = TokenManifest.read(tmp_path / "two")
    assert len(one.shards) > 2
    assert one.shards == two.shards
    for shard in one.shards:
        for name in (f"{shard.name}.bin", f"{shard.name}.idx"):
            assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_stopped_command_goes_on_and_damage_is_found(tmp_path, tokenizer_file, monkeypatch):
    corpus = write_lines(tmp_path / "code.jsonl", SOURCES[:8])
    whole, _ = make(corpus, tmp_path / "whole", tokenizer_file, part_bytes=20_000)
    out, written = tmp_path / "out", []
    write = tool.write_shard

    def recorded(folder, name, *rest):
        if len(written) == 2 and stops:
            raise KeyboardInterrupt
        written.append(name)
        return write(folder, name, *rest)

    stops = True
    monkeypatch.setattr(tool, "write_shard", recorded)
    with pytest.raises(KeyboardInterrupt):
        make(corpus, out, tokenizer_file, part_bytes=20_000)
    assert not (out / "manifest.json").exists()
    damaged = out / f"{written[1]}.bin"
    damaged.write_bytes(b"\0" + damaged.read_bytes()[1:])
    first, stops = written[0], False
    written.clear()
    manifest, said = make(corpus, out, tokenizer_file, part_bytes=20_000)
    assert said[0].startswith(f"1 of {len(whole.shards)} shards are complete already")
    assert first not in written
    assert damaged.stem in written
    assert manifest.shards == whole.shards
    written.clear()
    assert make(corpus, out, tokenizer_file, part_bytes=20_000)[0] == manifest
    assert written == []
    assert not list(out.glob("train-*.json"))


def test_other_input_is_not_written_over_what_is_there(tmp_path, tokenizer_file):
    corpus = write_lines(tmp_path / "code.jsonl", SOURCES[:6])
    make(corpus, tmp_path / "out", tokenizer_file, part_bytes=20_000)
    write_lines(corpus, SOURCES[6:7])
    with pytest.raises(UsageError, match="has token shards of other files or settings"):
        make(corpus, tmp_path / "out", tokenizer_file)
    manifest, _ = make(corpus, tmp_path / "out", tokenizer_file, overwrite=True)
    assert texts_of(manifest) == SOURCES[6:7]
    assert len(list((tmp_path / "out").glob("*.bin"))) == 1
    other = tmp_path / "tokenizer.json"
    train_bpe(300, SOURCES[:1]).save(str(other))
    with pytest.raises(UsageError, match="has shards of another tokenizer"):
        make(corpus, tmp_path / "out", other)
    before = (tmp_path / "out" / "tokenizer.json").read_bytes()
    with pytest.raises(UsageError, match="has token shards of other files or settings"):
        make(corpus, tmp_path / "out", None, train_bpe=300)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == before


def test_a_folder_is_not_complete_while_a_damaged_shard_is_written_again(tmp_path, tokenizer_file, monkeypatch):
    corpus = write_lines(tmp_path / "code.jsonl", SOURCES[:6])
    manifest, _ = make(corpus, tmp_path / "out", tokenizer_file, part_bytes=20_000)
    (tmp_path / "out" / "train-00001.bin").write_bytes(b"")
    with monkeypatch.context() as patch:
        patch.setattr(tool, "write_shard", lambda *_: pytest.fail("stopped"))
        with pytest.raises(pytest.fail.Exception):
            make(corpus, tmp_path / "out", tokenizer_file, part_bytes=20_000)
    assert not (tmp_path / "out" / "manifest.json").exists()
    again, said = make(corpus, tmp_path / "out", tokenizer_file, part_bytes=20_000)
    assert again == manifest
    assert said[0].startswith(f"{len(manifest.shards) - 1} of {len(manifest.shards)} shards")


def test_a_folder_of_transformers_gives_its_tokenizer_and_its_end(tmp_path, tokenizer_file):
    from transformers import PreTrainedTokenizerFast

    own = read_tokenizer(tokenizer_file)
    own.add_special_tokens(["<stop>"])
    PreTrainedTokenizerFast(tokenizer_object=own, eos_token="<stop>").save_pretrained(tmp_path / "hf")
    corpus = write_lines(tmp_path / "a.jsonl", ["some text"])
    manifest, _ = make(corpus, tmp_path / "out", tmp_path / "hf")
    assert manifest.end == own.token_to_id("<stop>") == 757
    assert texts_of(manifest) == ["some text"]
    assert make(corpus, tmp_path / "named", tmp_path / "hf", end=END_OF_TEXT)[0].end == 0


def test_a_tokenizer_that_cuts_and_pads_does_not_do_so_here(tmp_path, tokenizer_file):
    own = read_tokenizer(tokenizer_file)
    own.enable_truncation(4)
    own.enable_padding(length=16)
    own.save(str(tmp_path / "cutting.json"))
    texts = ["word " * 50, "short"]
    manifest, _ = make(write_lines(tmp_path / "a.jsonl", texts), tmp_path / "out", tmp_path / "cutting.json")
    assert texts_of(manifest) == texts


def test_a_large_vocabulary_has_wider_tokens(tmp_path):
    from tokenizers import Tokenizer, models

    vocabulary = {END_OF_TEXT: 0, **{f"w{number}": number for number in range(1, 70_000)}}
    Tokenizer(models.WordLevel(vocabulary, unk_token=END_OF_TEXT)).save(str(tmp_path / "words.json"))
    manifest, _ = make(write_lines(tmp_path / "a.jsonl", ["w69999"]), tmp_path / "out", tmp_path / "words.json")
    assert manifest.dtype == "uint32"
    assert TokenStream(manifest, manifest.shards).read(0, 2).tolist() == [69999, 0]
    assert np.fromfile(tmp_path / "out" / "train-00000.bin", "<u4").tolist() == [69999, 0]


def test_broken_input_is_named_by_file_and_line(tmp_path, tokenizer_file):
    lines = [json.dumps({"text": f"line {number}"}) for number in range(40)]

    def attempt(content: str | bytes, message: str, name: str = "bad.jsonl") -> None:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(DataError, match=message):
            make(path, tmp_path / "out", tokenizer_file, part_bytes=100)

    attempt("\n".join([*lines[:33], '{"text": "cut', *lines[33:]]), r"bad.jsonl, line 34: not JSON: Unterminated")
    attempt("\n".join([*lines[:20], '{"body": "x"}']), "line 21: there is no 'text'; its keys are body")
    attempt("\n".join([*lines[:5], '{"text": 7}']), "line 6: 'text' is 7, not a text")
    attempt("\n".join([*lines[:2], "[1]"]), "line 3: there is no 'text'; it is a list")
    attempt(b"abc\xff", "bad.txt is not UTF-8: byte 3 is 0xff", "bad.txt")
    attempt(b"not parquet", "bad.parquet cannot be read as parquet", "bad.parquet")
    attempt(b"not arrow", "bad.arrow cannot be read as arrow", "bad.arrow")
    attempt('{"text": ""}\n', "all 1 documents are empty")
    attempt("", "there are no documents to read")


def test_what_the_command_line_refuses(tmp_path, tokenizer_file, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "a.jsonl", ["text"])
    (tmp_path / "table.xlsx").write_text("")
    given = ["--tokenizer", tokenizer_file]
    for words, message in [
        (["tokenize", "a.jsonl", "--out", "o"], "needs --tokenizer or --train-bpe, and not both"),
        (["tokenize", "a.jsonl", "--out", "o", *given, "--train-bpe", 400], "and not both"),
        (["tokenize", "a.jsonl", "--out", "o", "--train-bpe", 100], "--train-bpe 100: at least 257"),
        (["tokenize", "missing", "--out", "o", *given], "missing: there is nothing at that path"),
        (["tokenize", "table.xlsx", "--out", "o", *given], "table.xlsx: cannot read .xlsx; allowed: .txt"),
        (["tokenize", "a.jsonl", "--out", "o", "--tokenizer", "none.json"], "there is nothing at that path"),
        (["tokenize", "a.jsonl", "--out", "o", "--tokenizer", "a.jsonl"], "'a.jsonl' cannot be read"),
        (["tokenize", "a.jsonl", "--out", "o", *given, "--end", "<no>"], "--end <no>: the tokenizer has no such token"),
        (["tokenize", "a.jsonl", "--out", "o", *given, "--workers", 0], "--workers 0: at least 1"),
        (["tokenise", "a.jsonl"], "Did you mean 'tokenize'"),
        ([], "data needs an action"),
    ]:
        answer = phalanx("data", *words)
        assert answer.code == 2, words
        assert message in answer.text, (words, answer.text)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    answer = phalanx("data", "tokenize", "a.jsonl", "--out", "o", *given)
    assert "pip install 'phalanx[data]'" in answer.text


def test_the_command_writes_shards_and_says_what_to_do_next(tmp_path, tokenizer_file, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "a.jsonl", SOURCES[:2])
    words = ("data", "tokenize", "a.jsonl", "--out", "shards", "--tokenizer", tokenizer_file, "--workers", 1)
    answer = phalanx(*words)
    assert answer.code == 0
    assert "phalanx train gpt --data ./shards" in answer.out
    written = json.loads(phalanx(*words, "--json").out)
    assert (written["documents"], written["vocab_size"], written["shards"]) == (2, 757, 1)
