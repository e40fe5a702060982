"""`phalanx export`: write a trained model for other programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from phalanx.cli.evaluate import add_run_flags
from phalanx.cli.flags import FlagParser
from phalanx.errors import UsageError, unknown_name
from phalanx.observe.format import size

FORMATS = {"safetensors": ".safetensors", "hf": "", "onnx": ".onnx", "torchscript": ".ts"}
"""What can be written, and the ending of its file; a Hugging Face model is a folder."""


def parser() -> FlagParser:
    """Return the parser of the verb."""
    parser = FlagParser(
        prog="phalanx export",
        usage="phalanx export RUN|CHECKPOINT [--format FORMAT] [-o PATH]",
        description="Write the best checkpoint of a run for other programs.",
    )
    add_run_flags(parser)
    parser.add_argument("--format", metavar="|".join(FORMATS), help="[that of the ending of --output, or safetensors]")
    parser.add_argument("-o", "--output", metavar="PATH", help="the file or folder [<run>.<ending>]")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    namespace = parser().parse_all(arguments)
    if namespace.format is not None and namespace.format not in FORMATS:
        raise UsageError(unknown_name("format", namespace.format, FORMATS))
    from phalanx.models.lora import merge_lora, remove_lora
    from phalanx.trainers.export import export_model
    from phalanx.trainers.saved_run import load_run, open_run

    ending = Path(namespace.output or "").suffix
    kind = namespace.format or next((name for name, end in FORMATS.items() if end and end == ending), "safetensors")
    needs_example = kind in ("onnx", "torchscript")
    if needs_example or namespace.model:
        found, data = open_run(namespace.run, namespace.checkpoint, namespace.model, namespace.data)
    else:
        found, data = load_run(namespace.run, checkpoint=namespace.checkpoint), None
    path = Path(namespace.output or f"{found.path.name}{FORMATS[kind]}")
    if path.exists() and (kind == "hf" or namespace.output is None):
        raise UsageError(f"{path} exists already", hint="Give another one: -o PATH")
    augment = found.trainer().augment if needs_example else None
    whole = remove_lora(merge_lora(found.model))  # other programs know no adapters
    export_model(whole, path, kind, data, augment, found.recipe)
    written = sum(file.stat().st_size for file in path.rglob("*")) if path.is_dir() else path.stat().st_size
    print(f"wrote {path} ({kind}, {size(written)}) from {found.checkpoint}")
    return 0
