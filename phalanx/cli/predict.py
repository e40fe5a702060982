"""`phalanx predict`: a trained model's outputs for data, or the continuation of a text."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.cli.evaluate import add_run_flags
from phalanx.cli.flags import FlagParser, add_config_flags, given_flags
from phalanx.errors import UsageError, unknown_name

_HELP = """Write the outputs of a run's best checkpoint for data, one per sample and in its order.

Without --output, each is a line of JSON. A language model continues --prompt."""
_ENDINGS = (".jsonl", ".npy", ".pt")


def parser() -> FlagParser:
    """Return the parser of the verb."""
    usage = "phalanx predict RUN|CHECKPOINT [--data DATA | --prompt TEXT] [-o FILE] [options]"
    parser = FlagParser(prog="phalanx predict", usage=usage, description=_HELP)
    add_run_flags(parser)
    parser.add_argument("-o", "--output", metavar="FILE", help="a file to write: .jsonl, .npy or .pt")
    parser.add_argument("--prompt", metavar="TEXT", help="the beginning of a text, for a language model")
    parser.add_argument("--max-tokens", type=int, default=200, metavar="N", help="tokens to add to --prompt [200]")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="X", help="0 takes the likeliest token [0.8]")
    add_config_flags(parser)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    namespace = parser().parse_all(arguments)
    if namespace.output and Path(namespace.output).suffix not in _ENDINGS:
        ending = Path(namespace.output).suffix or "(none)"
        raise UsageError(f"--output {namespace.output}: {unknown_name('ending', ending, _ENDINGS)}")
    if namespace.output and not Path(namespace.output).parent.is_dir():
        raise UsageError(f"--output {namespace.output}: there is no folder {Path(namespace.output).parent}")
    from phalanx.trainers.saved_run import load_run, open_run

    if namespace.prompt is not None:
        saved = load_run(namespace.run, checkpoint=namespace.checkpoint)
        print(_continued(saved, namespace))
        return 0
    found, data = open_run(namespace.run, namespace.checkpoint, namespace.model, namespace.data)
    if data is None:
        raise UsageError(f"{found.name} has no validation data", hint="Write: --data my_package.data:load")
    _write(found.predict(data, **given_flags(namespace)), namespace.output)
    return 0


def _continued(saved: Any, namespace: Any) -> str:
    """Return a text with what follows it, a chat model's answer, or what an encoder and decoder write for it."""
    from phalanx.models.decoder import Decoder
    from phalanx.models.generation import Sampling
    from phalanx.models.t5 import T5
    from phalanx.trainers.text_model import language_model, text_of_run, written_text

    model = language_model(saved)
    if not isinstance(model, Decoder | T5):
        raise UsageError(f"a {type(model).__name__} does not continue texts", hint="Leave --prompt out.")
    if not namespace.prompt or namespace.max_tokens < 1:
        raise UsageError("--prompt needs at least one letter to continue, and --max-tokens at least 1")
    asked = namespace.prompt, namespace.max_tokens, Sampling(temperature=namespace.temperature)
    if isinstance(model, T5):
        return written_text(saved, *asked)
    return text_of_run(saved).answer(*asked)


def _write(outputs: Any, output: str | None) -> None:
    import torch

    if output is not None and output.endswith(".pt"):
        torch.save(outputs, output)
        return
    rows = isinstance(outputs, list) and all(isinstance(row, torch.Tensor) for row in outputs)
    if not isinstance(outputs, torch.Tensor) and (not rows or str(output).endswith(".npy")):
        raise UsageError(
            f"the model's outputs are a {type(outputs).__name__}, not one tensor", hint="Write them with: -o outputs.pt"
        )
    if output is not None and output.endswith(".npy"):
        import numpy as np

        np.save(output, (outputs.float() if outputs.dtype == torch.bfloat16 else outputs).numpy())
        return
    with open(output, "w", encoding="utf-8") if output else _standard_output() as file:
        file.writelines(json.dumps(row.tolist()) + "\n" for row in outputs)


def _standard_output() -> Any:
    from contextlib import nullcontext

    return nullcontext(sys.stdout)
