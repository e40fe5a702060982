"""`phalanx serve` in process: OpenAI's endpoints over a small model, and what is wrong with a request."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from token_folders import make_documents, write_folder

from phalanx.errors import UsageError
from phalanx.recipes import Recipe
from phalanx.tools.serve.service import TextPiece, TextRequest, TextService, _Answer
from phalanx.zoo.data.chat_template import read_template
from phalanx.zoo.export import export_folder
from phalanx.zoo.models import build, save_pretrained
from phalanx.zoo.models.generation import KVCache, Sampling
from phalanx.zoo.recipe import TextCode
from phalanx.zoo.text_model import TextModel, jinja_ask, open_text

testclient = pytest.importorskip("starlette.testclient")

from phalanx.tools.serve.app import _Answers, make_app  # noqa: E402
from phalanx.tools.serve.body import read_body  # noqa: E402

TEMPLATE = (
    "{% for m in messages %}{% if not m['role'] %}{{ raise_exception('a role is empty') }}{% endif %}"
    "{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}a:"
)


def decoder(name: str = "gpt", **options):
    torch.manual_seed(2)
    model = build(name, seq_len=96, **options).double()
    for parameter in model.parameters():  # as initialised, a model repeats its last token
        parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def greedy(prompt: list[int], count: int) -> list[int]:
    return decoder().generate([prompt], count, temperature=0)[0][len(prompt) :]


@pytest.fixture(scope="module")
def service() -> Iterator[TextService]:
    small = TextModel(name="small", model=decoder(), code=TextCode(None), ask=jinja_ask(TextCode(None), TEMPLATE, {}))
    made = TextService(small, device="cpu", max_batch=4)
    yield made
    made.close()


@pytest.fixture(scope="module")
def client(service):
    return testclient.TestClient(make_app(service), raise_server_exceptions=False)


def complete(client, **body):
    return client.post("/v1/completions", json={"prompt": [1, 2, 3], "temperature": 0, **body})


def events(answer) -> list:
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_completion_is_the_greedy_text_of_the_model(client):
    answer = complete(client, model="small", max_tokens=20).json()
    expected = TextCode(None).text(greedy([1, 2, 3], 20))
    assert answer["choices"] == [{"index": 0, "text": expected, "logprobs": None, "finish_reason": "length"}]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 20, "total_tokens": 23}
    assert (answer["object"], answer["model"]) == ("text_completion", "small")
    assert answer["id"].startswith("cmpl-")
    assert complete(client).json()["usage"]["completion_tokens"] == 16  # OpenAI's default


def test_texts_and_tokens_several_prompts_and_choices(client):
    answer = complete(client, prompt=["ab", "xyz"], n=2, max_tokens=5).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert texts[0] == texts[1] == complete(client, prompt=[97, 98], max_tokens=5).json()["choices"][0]["text"]
    assert texts[2] == texts[3] == complete(client, prompt=[[120, 121, 122]], max_tokens=5).json()["choices"][0]["text"]
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 20, "total_tokens": 25}


def test_a_stream_gives_the_same_text_in_pieces(client):
    whole = complete(client, max_tokens=30).json()["choices"][0]
    parts = events(complete(client, max_tokens=30, stream=True, stream_options={"include_usage": True}))
    assert parts[-1]["usage"]["completion_tokens"] == 30
    assert parts[-1]["choices"] == []
    assert len(parts) > 10
    choices = [part["choices"][0] for part in parts[:-1]]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]


def test_a_stop_text_ends_the_answer_before_it_also_in_a_stream(client):
    whole = complete(client, max_tokens=40).json()["choices"][0]["text"]
    stop = whole[9:12]
    expected = whole[: whole.index(stop)]
    answer = complete(client, max_tokens=40, stop=["never", stop]).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (expected, "stop")
    assert answer["usage"]["completion_tokens"] < 40
    parts = events(complete(client, max_tokens=40, stop=stop, stream=True))
    assert "".join(part["choices"][0]["text"] for part in parts) == expected


def test_a_seed_gives_the_same_answer_and_choices_differ(client):
    body = {"temperature": 1.5, "seed": 7, "n": 2, "max_tokens": 20, "top_p": 0.9}
    first, again, other = (
        [choice["text"] for choice in complete(client, **{**body, "seed": seed}).json()["choices"]]
        for seed in (7, 7, 8)
    )
    assert first == again
    assert first[0] != first[1]
    assert first != other


def test_a_chat_uses_the_template(client):
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    body = {"messages": messages, "temperature": 0, "max_completion_tokens": 8}
    answer = client.post("/v1/chat/completions", json=body).json()
    expected = complete(client, prompt="u:hi\na:", max_tokens=8).json()["choices"][0]["text"]
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": expected}
    assert (answer["object"], answer["usage"]["prompt_tokens"]) == ("chat.completion", 7)
    parts = events(client.post("/v1/chat/completions", json={**body, "stream": True}))
    assert parts[0]["choices"][0]["delta"]["role"] == "assistant"
    assert {part["object"] for part in parts} == {"chat.completion.chunk"}
    assert "".join(part["choices"][0]["delta"]["content"] for part in parts) == expected


def test_fields_that_ask_for_nothing_are_accepted(client):
    nothing = {"best_of": 1, "response_format": {"type": "text"}, "tool_choice": "none", "tools": [], "logprobs": None}
    assert complete(client, **nothing).status_code == 200
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}, {"role": "user", "content": "b"}]
    answer = client.post("/v1/chat/completions", json={"messages": turns, "max_tokens": 1, "stream_options": {}})
    assert answer.json()["usage"]["prompt_tokens"] == len("u:a\na:\nu:b\na:")


def test_a_chat_fills_the_context_where_no_limit_is_given(client):
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}
    assert client.post("/v1/chat/completions", json=body).json()["usage"]["total_tokens"] == 96


WRONG = {
    "a text": (
        {"max_tokens": "many"},
        400,
        "max_tokens",
        'max_tokens = "many": it must be a whole number of at least 1',
    ),
    "true": ({"n": True}, 400, "n", "n = true: it must be a whole number from 1 to 128"),
    "too hot": ({"temperature": 2.5}, 400, "temperature", "it must be a number from 0 to 2"),
    "top_p": ({"top_p": -0.1}, 400, "top_p", "from 0 to 1"),
    "seed": ({"seed": 2**70}, 400, "seed", "seed = "),
    "stops": ({"stop": ["a"] * 5}, 400, "stop", "at most 4 texts"),
    "empty stop": ({"stop": ""}, 400, "stop", "none empty"),
    "stream": ({"stream": "yes"}, 400, "stream", "it must be true or false"),
    "best of": ({"best_of": 2}, 400, "best_of", "best_of = 2 is not supported here"),
    "format": ({"response_format": {"type": "json_object"}}, 400, "response_format", "is not supported here"),
    "option": ({"stream_options": {"include_usages": True}}, 400, "stream_options", "Did you mean 'include_usage'?"),
    "options": ({"stream_options": 3}, 400, "stream_options", "include_usage"),
    "logprobs": ({"logprobs": 3}, 400, "logprobs", "logprobs = 3 is not supported here. Leave it out"),
    "unknown": ({"max_token": 3}, 400, "max_token", "Did you mean 'max_tokens'?"),
    "model": ({"model": "gpt-4"}, 404, "model", 'model = "gpt-4": this server has "small"'),
    "no prompt": ({"prompt": None}, 400, "prompt", "a text, a list of texts, or a list of tokens"),
    "empty": ({"prompt": ""}, 400, "prompt", "at least one token"),
    "numbers": ({"prompt": [1, 256]}, 400, "prompt", "tokens from 0 to 255"),
    "half a pair": ({"prompt": "\ud83d"}, 400, "prompt", "not text in Unicode"),
    "long": ({"prompt": "x" * 96}, 400, "prompt", "a prompt of 96 tokens does not fit into the model's context of 96"),
    "no room": ({"max_tokens": 94}, 400, "prompt", "a prompt of 3 tokens and max_tokens = 94 does not fit"),
    "many": ({"prompt": ["x"] * 100, "n": 2}, 400, "n", "at most 128 answers"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_field_is_named_with_what_is_allowed(client, case):
    change, status, param, message = WRONG[case]
    answer = client.post("/v1/completions", content=json.dumps({"prompt": [1, 2, 3], **change}))
    assert answer.status_code == status
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert message in error["message"]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (None, "messages: it must be a list"),
        ([], "messages: it must be a list"),
        (["hi"], "messages[0]: it must have a role"),
        ([{"role": "user"}], "messages[0].content: it must be a text"),
        ([{"role": "user", "content": None}], "messages[0].content: it must be a text"),
        ([{"role": "assistant", "content": None, "tool_calls": [{}]}], "messages[0].content: it must be a text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "parts of type text"),
        ([{"role": "", "content": "x"}], "the chat template refuses these messages: a role is empty"),
    ],
)
def test_wrong_messages_are_named(client, messages, said):
    answer = client.post("/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


@pytest.mark.parametrize(("body", "said"), [(b"{", "is not JSON"), (b"[1]", "a JSON list"), (b"[" * 10**5, "not JSON")])
def test_a_body_that_is_not_an_object_is_said(client, body, said):
    answer = client.post("/v1/completions", content=body)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_other_paths_and_methods_have_errors_of_the_same_shape(client):
    missing, wrong = client.get("/v1/nothing"), client.get("/v1/completions")
    assert (missing.status_code, wrong.status_code) == (404, 405)
    assert "POST /v1/completions" in missing.json()["error"]["message"]


def test_health_and_models(client):
    assert client.get("/health").json() == {"status": "ok", "model": "small", "active": 0, "waiting": 0}
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["small"]


def test_a_key_is_asked_for(service):
    client = testclient.TestClient(make_app(service, key="secret"))
    assert complete(client).status_code == 401
    assert complete(client).json()["error"]["code"] == "invalid_api_key"
    right = client.post(
        "/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"Authorization": "Bearer secret"}
    )
    assert right.status_code == 200


def test_another_host_name_is_refused(service):
    client = testclient.TestClient(make_app(service, hosts=["localhost"]))
    assert client.get("/health", headers={"Host": "localhost:8000"}).status_code == 200
    assert client.get("/health", headers={"Host": "evil.example"}).status_code == 400


def test_a_stream_that_is_left_ends_its_answers(service):
    asked = read_body(b'{"prompt": "ab", "max_tokens": 90, "n": 2}', service.text, chat=False)

    async def leave() -> None:
        stream = _Answers(service, asked, chat=False)._all()
        await anext(stream)
        await stream.aclose()

    asyncio.run(leave())
    assert [request.cancelled for request in asked.requests] == [True, True]
    assert ask(service, [1], 3).done.wait(60)


def test_a_client_that_leaves_before_its_whole_answer_ends_it(service, monkeypatch):
    """As an ASGI server does it: the body, then the disconnect; no step ends before the client has left."""
    step, asked, left = KVCache.step, [], threading.Event()
    monkeypatch.setattr(KVCache, "step", lambda *given, **more: left.wait(60) and step(*given, **more))
    monkeypatch.setattr("phalanx.tools.serve.app._LOOK_SECONDS", 0.01)
    read = read_body
    monkeypatch.setattr(
        "phalanx.tools.serve.app.read_body", lambda *given, **more: asked.append(read(*given, **more)) or asked[0]
    )
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [(b"host", b"x")]}
    scope |= {"query_string": b"", "server": ("x", 80), "scheme": "http"}
    body = {"type": "http.request", "body": b'{"prompt": "ab", "max_tokens": 90, "n": 2}', "more_body": False}
    events, sent = [body], []

    async def receive():
        while not events and not asked:  # the client leaves when its request is known
            await asyncio.sleep(0.01)
        return events.pop(0) if events else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    try:
        asyncio.run(make_app(service)(scope, receive, send))
    finally:
        left.set()
    assert [request.cancelled for request in asked[0].requests] == [True, True]
    assert sent[0]["status"] == 499
    assert ask(service, [1], 3).done.wait(60)


def test_without_a_template_a_chat_is_refused_with_what_to_do():
    service = TextService(TextModel(name="plain", model=decoder(), code=TextCode(None)), device="cpu")
    answer = testclient.TestClient(make_app(service)).post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]}
    )
    service.close()
    assert answer.status_code == 400
    assert "plain has no chat template" in answer.json()["error"]["message"]
    assert "/v1/completions" in answer.json()["error"]["message"]


class Collected:
    """An answer as a caller of the service collects it."""

    def __init__(self) -> None:
        self.pieces: list[TextPiece] = []
        self.done = threading.Event()

    def take(self, piece: TextPiece) -> None:
        self.pieces.append(piece)
        if piece.finish is not None:
            self.done.set()


def ask(service: TextService, prompt: list[int], count: int, found: Collected | None = None) -> Collected:
    found = found or Collected()
    service.submit(TextRequest(prompt=prompt, max_tokens=count, emit=found.take, sampling=Sampling(temperature=0)))
    return found


def test_requests_that_come_together_share_steps_and_get_their_own_texts(service, monkeypatch):
    widths = []
    step = KVCache.step
    monkeypatch.setattr(
        KVCache,
        "step",
        lambda self, tokens, *args, **more: widths.append(len(tokens)) or step(self, tokens, *args, **more),
    )
    prompts = [[number + 1] * (3 * number + 1) for number in range(9)]  # more than rows
    answers = [ask(service, prompt, 30) for prompt in prompts]
    assert all(answer.done.wait(60) for answer in answers)
    assert len(widths) < 9 * 29 / 2
    assert max(widths) == 4
    for prompt, answer in zip(prompts, answers, strict=True):
        assert "".join(piece.text for piece in answer.pieces) == TextCode(None).text(greedy(prompt, 30))


def test_many_clients_at_once_get_what_one_gets(client):
    alone = complete(client, max_tokens=10).json()["choices"]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: complete(client, max_tokens=10).json()["choices"], range(8)))
    assert answers == [alone] * 8


def test_a_client_that_leaves_frees_its_row(service):
    gone = Collected()
    request = TextRequest(prompt=[1], max_tokens=90, emit=gone.take)
    request.cancelled = True
    service.submit(request)
    assert ask(service, [1], 3).done.wait(60)
    assert not gone.done.is_set()
    assert service.load_now == {"active": 0, "waiting": 0}


def test_a_step_that_fails_is_answered_and_the_service_goes_on(service, client, monkeypatch, capfd):
    def fail(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(KVCache, "step", fail)
    answer = complete(client)
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "out of memory" in capfd.readouterr().err
    monkeypatch.undo()
    assert complete(client).status_code == 200


class Broken(Collected):
    """A caller that cannot take a text."""

    def take(self, piece: TextPiece) -> None:
        super().take(piece)
        if piece.text:
            raise OSError("nowhere to write")


class Gone(Collected):
    """A caller that can take nothing."""

    def take(self, piece: TextPiece) -> None:
        super().take(piece)
        raise OSError("gone")


def test_an_answer_that_cannot_be_sent_ends_alone(service, capfd):
    answers = [ask(service, [number + 1], 60, kind()) for number, kind in enumerate((Broken, Collected, Gone))]
    assert all(answer.done.wait(60) for answer in answers)
    assert [answer.pieces[-1].finish for answer in answers] == ["error", "length", "error"]
    assert "nowhere to write" in capfd.readouterr().err
    assert not service.is_failing


@pytest.mark.parametrize("at", [1, 5])
def test_a_token_that_cannot_be_drawn_ends_its_answer_alone(service, monkeypatch, capfd, at):
    draw = _Answer.draw

    def fail_for_one(self, logits):
        if self.request.prompt == [7] and len(self.made) == at - 1:
            raise RuntimeError("probability tensor contains nan")
        return draw(self, logits)

    monkeypatch.setattr(_Answer, "draw", fail_for_one)
    answers = [ask(service, prompt, 30) for prompt in ([1], [7], [2])]
    assert all(answer.done.wait(60) for answer in answers)
    assert [answer.pieces[-1].finish for answer in answers] == ["length", "error", "length"]
    assert "contains nan" in capfd.readouterr().err


def test_health_is_503_after_two_batches_failed_in_a_row_until_one_works(service, client, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("the GPU is lost")

    monkeypatch.setattr(KVCache, "prefill", fail)
    found = []
    for _ in range(2):
        assert complete(client).status_code == 500
        found.append(client.get("/health"))
    assert [answer.status_code for answer in found] == [200, 503]
    assert found[1].json()["status"] == "failing"
    monkeypatch.undo()
    for _ in range(2):  # the second one begins after all of the first one's step
        assert complete(client, max_tokens=2).status_code == 200
    assert client.get("/health").status_code == 200


def test_a_template_may_use_all_that_transformers_allows():
    """As templates of published models do: marks of answers, loops that end early, dates, JSON as it is."""
    messages = [{"role": role, "content": f"é<{number}>"} for number, role in enumerate("abc")]
    template = (
        "{%- for m in messages %}\n{% if loop.index == 2 %}{% continue %}{% endif %}\n"
        "{% generation %}\n[{{ m | tojson }}]\n{% endgeneration %}\n{% if loop.index == 3 %}{% break %}{% endif %}"
        "{% endfor %}{{ strftime_now('%Y') }}{% if tools is not none or documents is not none %}tools{% endif %}"
    )
    tokens = jinja_ask(TextCode(None), template, {})(messages)
    transformers = pytest.importorskip("transformers.utils.chat_template_utils")
    (expected,), _ = transformers.render_jinja_template([messages], chat_template=template)
    assert bytes(tokens).decode() == expected
    assert expected.startswith('[{"role": "a", "content": "é<0>"}]')


@pytest.mark.parametrize(
    "template", ["{{ 1 / 0 }}", "{{ messages[9].role.upper() }}", "{% for %}", "{{ [] | first | int + {} }}"]
)
def test_any_error_of_a_template_is_explained(template):
    with pytest.raises(UsageError, match="the chat template refuses these messages: "):
        jinja_ask(TextCode(None), template, {})([{"role": "user", "content": "x"}])


def test_a_closed_service_ends_what_it_has():
    service = TextService(TextModel(name="x", model=decoder(), code=TextCode(None)), device="cpu")
    answers = [ask(service, [1], 90) for _ in range(20)]
    service.close()
    assert all(answer.done.wait(10) for answer in answers)
    assert ask(service, [1], 3).pieces[-1].finish == "error"


def test_a_letter_of_several_bytes_comes_whole():
    letters = list("aé€😀".encode())
    found = Collected()
    request = TextRequest(prompt=[1], max_tokens=len(letters), emit=found.take)
    answer = _Answer(request, TextCode(None), frozenset(), torch.device("cpu"))
    for token in letters:
        answer.add(token)
    assert [piece.text for piece in found.pieces] == ["a", "é", "€", "😀"]


@pytest.fixture
def folder(tmp_path):
    """A Hugging Face folder with a tokenizer of whole words, an end token and a chat template."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["<s>", "</s>", "hello", "world", *map(str, range(60))])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<s>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    model = decoder("llama", vocab_size=64)
    save_pretrained(model, tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": [1, 5]}))
    settings = {"eos_token": {"content": "</s>"}, "bos_token": "<s>", "chat_template": "{{ bos_token }}hello"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def test_a_folder_of_hugging_face_is_served_with_its_tokenizer_and_end_tokens(folder):
    served = open_text(str(folder))
    assert served.end_tokens == {1, 5}
    assert served.prompt("hello world") == [0, 2, 3]
    assert served.chat([{"role": "user", "content": "x"}]) == [0, 2]
    expected = served.model.generate([[0, 2, 3]], 60, temperature=0, end_tokens=[1, 5])[0][3:]
    service = TextService(served, device="cpu")
    answer = complete(testclient.TestClient(make_app(service)), prompt="hello world", max_tokens=60).json()
    service.close()
    assert answer["usage"]["completion_tokens"] == len(expected)
    assert answer["choices"][0]["finish_reason"] == ("stop" if expected[-1] in (1, 5) else "length")
    shown = expected[:-1] if expected[-1] in (1, 5) else expected
    assert answer["choices"][0]["text"] == served.code.text(shown)


@pytest.mark.parametrize("template", ["plain", "own.jinja", None])
def test_an_exported_run_on_conversations_keeps_its_template_and_end_tokens(folder, tmp_path, template, monkeypatch):
    """The next run and `phalanx serve` read from the folder what the run had as data.template."""
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if template == "own.jinja":
        template = str(tmp_path / template)
        Path(template).write_text("{% for m in messages %}{{ m.content }} 7 {% endfor %}8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    own = {} if template else {"chat_template": "{% for m in messages %}{{ m.content }} 9{% endfor %}"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, **own}))
    data = {"name": "chats", "tokenizer": str(folder), "template": template}
    recipe = Recipe("sft", "", data, {"name": "llama"})
    out = tmp_path / "out"
    export_folder(decoder("llama", vocab_size=64), out, recipe=recipe)
    messages = [{"role": "user", "content": "hello"}]
    expected = read_template(str(folder), template).ask(messages)
    assert read_template(str(out), None).ask(messages) == expected
    served = open_text(str(out))
    assert served.chat(messages) == expected
    assert set(read_template(str(out), None).end_tokens) <= served.end_tokens
    assert 1 in served.end_tokens


def test_an_exported_run_on_chats_of_bytes_has_no_tokenizer_to_write(tmp_path):
    recipe = Recipe("sft", "", {"name": "chats", "template": "plain"}, {"name": "llama"})
    export_folder(decoder("llama"), tmp_path / "out", recipe=recipe)
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}


def test_a_run_on_token_shards_has_their_tokenizer_and_end_token(folder, monkeypatch):
    write_folder(folder, [make_documents(2)])
    model = decoder("llama", vocab_size=64)
    run = SimpleNamespace(name="run", model=model, tokenizer=str(folder / "tokenizer.json"), recipe=None)
    monkeypatch.setattr("phalanx.zoo.text_model.load_run", lambda name, checkpoint: run)
    found = open_text("run")
    assert found.end_tokens == {0}
    assert found.prompt("hello world") == [2, 3]  # its documents begin without a begin token


def test_a_folder_without_a_tokenizer_or_with_an_encoder_is_explained(folder, tmp_path):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match=r"no tokenizer\.json"):
        open_text(str(folder))
    save_pretrained(build("bert"), tmp_path / "bert")
    with pytest.raises(UsageError, match="holds a Bert, and serve answers with texts of gpt, llama and moe"):
        open_text(str(tmp_path / "bert"))


def test_wrong_settings_are_explained():
    small = TextModel(name="x", model=decoder(), code=TextCode(None))
    with pytest.raises(UsageError, match="--max-batch 0"):
        TextService(small, device="cpu", max_batch=0)


def test_four_clients_take_much_less_than_four_times_one(service):
    """A step of four rows costs little more than a step of one: what is computed is small."""

    def seconds(count: int) -> float:
        began = time.perf_counter()
        answers = [ask(service, [1, 2, 3], 60) for _ in range(count)]
        assert all(answer.done.wait(120) for answer in answers)
        return time.perf_counter() - began

    ratios = []
    for _ in range(5):
        ratios.append(seconds(4) / seconds(1))
        if ratios[-1] < 2.5:
            return
    pytest.fail(f"four at once took {ratios} times as long as one")
