"""Models and data of the Hub, from a server that answers as the Hub does: what is fetched, kept, and refused."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from phalanx import load_run
from phalanx.zoo.hub import _read
from phalanx.zoo.models import build, save_pretrained

COMMIT = "1" * 40


class Hub(ThreadingHTTPServer):
    """Repositories in folders: models/ORG/NAME and datasets/ORG/NAME."""

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.root, self.fetched = root, []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        if path.startswith("api/"):
            kind, org, name, *rest = [*path.removeprefix("api/").split("/"), "", ""]
            folder = self.server.root / kind / org / name
            if not name or not folder.is_dir():
                return self.fail(404, "RepoNotFound")
            if rest[1:2] not in ([""], ["main"], [COMMIT]):
                return self.fail(404, "RevisionNotFound")
            files = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
            if rest[:1] == ["tree"]:
                listed = [
                    {"type": "file", "path": file, "size": (folder / file).stat().st_size, "oid": "0" * 40}
                    for file in files
                ]
                return self.send(json.dumps(listed).encode())
            siblings = [{"rfilename": file} for file in files]
            return self.send(json.dumps({"id": f"{org}/{name}", "sha": COMMIT, "siblings": siblings}).encode())
        kind, path = ("datasets", path.removeprefix("datasets/")) if path.startswith("datasets/") else ("models", path)
        org, name, _, _, file = path.split("/", 4)
        content = (self.server.root / kind / org / name / file).read_bytes()
        if self.command == "GET":
            self.server.fetched.append(file)
        return self.send(content)

    do_HEAD = do_GET

    def send(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def fail(self, code: int, word: str) -> None:
        self.send_response(code)
        self.send_header("X-Error-Code", word)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path):
    pytest.importorskip("huggingface_hub")
    server = Hub(tmp_path / "hub")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


ASK = """
import json, sys
from phalanx.errors import UsageError
from phalanx.zoo.hub import hub_path
answers = []
for word in sys.argv[1:]:
    purpose, _, place = word.rpartition("|")
    try:
        path = hub_path(place, purpose or ("data" if "datasets/" in place else "model"))
        answers.append([str(path), sorted(file.name for file in path.iterdir()) if path.is_dir() else []])
    except UsageError as error:
        answers.append([str(error), error.hint])
print(json.dumps(answers))
"""


def asked(tmp_path: Path, url: str, *places: str, **env: str) -> list[list]:
    """Return what becomes of places of a Hub, in a process that has its URL from the beginning."""
    env = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "home"), **env}
    done = subprocess.run([sys.executable, "-c", ASK, *places], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_repositories_become_folders_and_are_kept(hub, tmp_path):
    folder = hub.root / "models/org/small"
    save_pretrained(build("bert", task="classify", classes=2), folder)
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "modeling.py").write_text("raise SystemExit")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "config.json").write_text("{}")
    pickled = hub.root / "models/org/pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text("{}")
    (pickled / "pytorch_model.bin").write_bytes(b"a pickle")
    tables = hub.root / "datasets/org/pairs/mrpc"
    tables.mkdir(parents=True)
    (tables / "train.jsonl").write_text('{"text": "a", "label": 1}\n')
    (tables.parent / "README.md").write_text("a card")
    answers = asked(
        tmp_path,
        hub.url,
        "hf://org/small",
        f"hf://org/small@{COMMIT}",
        "hf://datasets/org/pairs/mrpc",
        "hf://org/none",
        "hf://org/small@nope",
        "hf://datasets/org/pairs/sst2",
        "hf://",
        "hf://org/small@",
        "hf://a b/c",
        "hf://org/pickled",
        "data|hf://org/small",
        "hf://datasets/org/pairs/mrpc/train.jsonl",
        "hf://datasets/org/pairs/mrpc/*.jsonl",
    )
    (model, names), again, (data, rows), none, revision, empty, nothing, unfinished, wrong, *others = answers
    assert names == ["config.json", "model.safetensors", "tokenizer.json"], "no pickles, no code and no other formats"
    assert model.endswith(COMMIT)
    assert again[0] == model
    assert rows == ["train.jsonl"]
    assert data.endswith("mrpc")
    assert "no such repository, or it is private" in none[0]
    assert "hf auth login" in none[1]
    assert "has no revision 'nope'" in revision[0]
    assert "no tables were found in sst2" in empty[0]
    assert "hf://ORG/NAME" in nothing[1]
    assert "hf://ORG/NAME" in unfinished[1]
    assert "is not a valid repository name" in wrong[0]
    pickle, not_data, (file, _), (pattern, _) = others
    assert "has no weights as safetensors; pickles (pytorch_model.bin) are not read" in pickle[0]
    assert "names a model, and a data set is needed" in not_data[0]
    assert "hf://datasets/ORG/NAME" in not_data[1]
    assert Path(file).read_text() == (tables / "train.jsonl").read_text()
    assert pattern.endswith("mrpc/*.jsonl"), "a pattern that data are read by"
    once = ["config.json", "config.json", "model.safetensors", "mrpc/train.jsonl", "tokenizer.json"]
    assert sorted(hub.fetched) == once, "each file once; a config is there twice"
    (only_tokens,) = asked(tmp_path / "new", hub.url, "tokenizer|hf://org/small")
    assert only_tokens[1] == ["config.json", "tokenizer.json"]

    kept, missing = asked(tmp_path, hub.url, "hf://org/small", "hf://org/other", HF_HUB_OFFLINE="1")
    assert kept[0] == model, "no network is needed for what is in the cache"
    assert "is not in the cache and cannot be downloaded" in missing[0]
    assert "hf download org/other --local-dir FOLDER" in missing[1]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("hf://gpt2@607a30d", ("gpt2", False, "607a30d", "")),
        ("hf://org/name@refs/pr/1", ("org/name", False, "refs/pr/1", "")),
        ("hf://datasets/a/b@refs%2Fconvert%2Fparquet/default", ("a/b", True, "refs/convert/parquet", "default")),
        ("hf://datasets/a/b/c/train.csv", ("a/b", True, None, "c/train.csv")),
    ],
)
def test_names_are_those_of_hugging_faces_file_system(text, place):
    assert _read(text) == place


def test_a_run_starts_from_a_model_of_the_hub(hub, tmp_path):
    pytest.importorskip("datasets")
    save_pretrained(build("bert", vocab_size=512), hub.root / "models/org/small")
    tables = hub.root / "datasets/org/texts"
    tables.mkdir(parents=True)
    rows = [json.dumps({"text": f"text {number}", "label": number % 2}) for number in range(20)]
    (tables / "train.jsonl").write_text("\n".join(rows))
    (tables / "validation.jsonl").write_text("\n".join(rows[:4]))
    words = ["train", "bert-classify", "--data", "hf://datasets/org/texts", "--set", "model.pretrained=hf://org/small"]
    words += ["--set", "data.seq_len=16", "--num-workers", "1", "--batch-size", "4", "--max-steps", "2"]
    words += ["--run-dir", str(tmp_path / "run")]
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", *words], env=env, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "weights of " in done.stdout
    assert "val accuracy" in done.stdout
    recipe = load_run(tmp_path / "run").recipe
    assert recipe.model["pretrained"].endswith(COMMIT), "a run remembers the commit"
    assert Path(recipe.data["root"]).is_dir()
