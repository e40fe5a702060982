"""A language model with all that turns texts into its tokens and back: of a run, or of a Hugging Face folder."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from phalanx.errors import UsageError, a_type
from phalanx.model import WrapsModel, implements
from phalanx.recipes import CONVERSATIONS
from phalanx.zoo.data.chat_template import Messages, read_template
from phalanx.zoo.data.masked import byte_sentinels
from phalanx.zoo.data.tables import read_tokenizer
from phalanx.zoo.models.decoder import Decoder
from phalanx.zoo.models.generation import Sampling
from phalanx.zoo.models.hf import load_pretrained
from phalanx.zoo.models.hf.model_folder import end_tokens_of, read_json
from phalanx.zoo.recipe import TextCode, printable
from phalanx.zoo.saved_run import SavedRun, load_run
from phalanx.zoo.t5_tokens import T5_END, T5_PAD
from phalanx.zoo.token_data import read_token_manifest

Ask = Callable[[Messages], list[int]]
"""Returns the tokens of a chat, up to where the model's answer begins."""


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """A decoder, its tokenizer, the tokens that end a text, and what turns a chat into tokens."""

    name: str
    model: Decoder
    code: TextCode
    end_tokens: frozenset[int] = frozenset()
    ask: Ask | None = None
    is_chat: bool = False
    """Whether it was trained on conversations: a text is then asked, not continued."""
    adds_special: bool = False
    """Whether a prompt begins as the tokenizer's own rules say, for example with a begin token."""

    def prompt(self, text: str) -> list[int]:
        """Return the tokens of a text that is to be continued."""
        return self.code.encode(text, special=self.adds_special)

    def chat(self, messages: Messages) -> list[int]:
        """Return the tokens of a chat, up to where the model's answer begins."""
        if self.ask is None:
            raise UsageError(
                f"{self.name} has no chat template, so messages have no meaning for it",
                hint="Use /v1/completions, or serve a folder with chat_template.jinja or a chat_template in "
                "tokenizer_config.json.",
            )
        return self.ask(messages)

    def answer(self, text: str, count: int, sampling: Sampling) -> str:
        """Return a text with what follows it; of a model that was trained on conversations, its answer alone."""
        prompt = self.chat([{"role": "user", "content": text}]) if self.is_chat else self.prompt(text)
        (row,) = self.model.generate([prompt], count, end_tokens=tuple(self.end_tokens), **asdict(sampling))
        output = row[len(prompt) :] if self.is_chat else row
        return self.code.decode(output[:-1] if output and output[-1] in self.end_tokens else output)


def open_text(name: str, checkpoint: str = "best") -> TextModel:
    """Return the language model of a run (as `load_run` finds it) or of a Hugging Face folder."""
    folder = Path(name)
    if (folder / "config.json").is_file():
        return _of_folder(folder)
    return text_of_run(load_run(name, checkpoint=checkpoint))


def text_of_run(run: SavedRun) -> TextModel:
    """Return the language model of a run."""
    model = _checked(language_model(run), run.name)
    data = {} if run.recipe is None else run.recipe.fitted().data
    if data.get("name") in CONVERSATIONS and data.get("template") != "none":
        template = read_template(data.get("tokenizer"), data.get("template"))
        ends = frozenset(template.end_tokens)
        code = TextCode(run.tokenizer)
        return TextModel(name=run.name, model=model, code=code, end_tokens=ends, ask=template.ask, is_chat=True)
    if run.tokenizer is None:
        return TextModel(name=run.name, model=model, code=TextCode(None))
    tokens = Path(run.tokenizer).parent
    document = read_token_manifest(tokens)
    ends = end_tokens_of({"eos_token_id": document["tokenizer"]["end"]} if document else {})
    return _with_tokenizer(run.name, model, tokens, ends)


def language_model(run: SavedRun) -> nn.Module:
    """Return the model of a run; of one that an objective such as DPO is around, the model inside."""
    model: nn.Module = run.model
    return model.trained_model() if implements(model, WrapsModel) else model


def written_text(run: SavedRun, text: str, count: int, sampling: Sampling) -> str:
    """Return what the T5 of a run writes for a text."""
    folder = None if run.recipe is None else run.recipe.data.get("tokenizer")
    code, shift = (None, byte_sentinels().shift) if folder is None else (read_tokenizer(folder), 0)
    tokens = [byte + shift for byte in text.encode()] if code is None else code.encode(text, add_special_tokens=False)
    model: Any = run.model
    (row,) = model.write(torch.tensor([[*tokens, T5_END]]), count, sampling=sampling).tolist()
    answer = row[: row.index(T5_END)] if T5_END in row else [token for token in row if token != T5_PAD]
    return printable(TextCode(None).text([token - shift for token in answer]) if code is None else code.decode(answer))


def _of_folder(folder: Path) -> TextModel:
    model = _checked(load_pretrained(folder), str(folder))
    if not (folder / "tokenizer.json").is_file():
        raise UsageError(
            f"{folder} has no tokenizer.json, so texts have no tokens",
            hint="With transformers: AutoTokenizer.from_pretrained(...).save_pretrained(folder) writes it.",
        )
    files = ("config.json", "generation_config.json")
    ends = frozenset[int]().union(*(end_tokens_of(_read(folder / file)) for file in files))
    return _with_tokenizer(folder.resolve().name, model, folder, ends, adds_special=True)


def _with_tokenizer(
    name: str, model: Decoder, folder: Path, ends: frozenset[int], *, adds_special: bool = False
) -> TextModel:
    settings = _read(folder / "tokenizer_config.json")
    template = settings.get("chat_template")
    if (file := folder / "chat_template.jinja").is_file():
        template = file.read_text(encoding="utf-8")
    special = {}
    for key in ("bos_token", "eos_token"):
        token = settings.get(key)
        special[key] = str((token.get("content") if isinstance(token, dict) else token) or "")
    code = TextCode(str(folder / "tokenizer.json"))
    return TextModel(
        name=name,
        model=model,
        code=code,
        end_tokens=ends,
        ask=jinja_ask(code, template, special) if isinstance(template, str) else None,
        adds_special=adds_special,
    )


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _checked(model: nn.Module, name: str) -> Decoder:
    if isinstance(model, Decoder):
        return model
    raise UsageError(
        f"{name} holds {a_type(model)}, and serve answers with texts of gpt, llama and moe",
        hint="Use phalanx predict for outputs of other models; a transformers model of GPT-2 or Llama is served from "
        "the folder that phalanx export RUN --format hf writes.",
    )


def jinja_ask(code: TextCode, template: str, special: Mapping[str, str]) -> Ask:
    """Return what asks by a chat template; `special`: texts of tokens that it may use (bos_token, eos_token)."""
    return lambda messages: code.encode(_rendered(template, messages, special))


def _rendered(template: str, messages: Messages, special: Mapping[str, str]) -> str:
    """Return a chat as text. The template is code of another's: it runs in Jinja's sandbox."""
    try:
        environment = _jinja_environment()
    except ImportError:
        raise UsageError("a chat template needs jinja2", hint="Run: pip install 'phalanx[serve]'") from None
    variables = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True, **special}
    try:
        return str(environment.from_string(template).render(variables))
    except Exception as error:  # a template's own, or any that its code meets in messages of another form
        raise UsageError(f"the chat template refuses these messages: {error}") from error


@functools.cache
def _jinja_environment() -> Any:
    """Return Jinja as transformers sets it up for chat templates, without its marks of what the assistant says."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} ... {% endgeneration %}: its content."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's own annotation

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)  # the local time, as there
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)  # Jinja's own is for HTML
    return environment
