"""`phalanx export`: write a trained model for other programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from phalanx.cli.evaluate import add_run_flags, asked_of
from phalanx.cli.flags import FlagParser
from phalanx.cli.json_output import add_output_flag, check_output
from phalanx.errors import UsageError, unknown_name
from phalanx.observe.format import size

FORMATS = {"safetensors": (".safetensors",), "hf": (), "onnx": (".onnx",), "torchscript": (".ts", ".pt")}
"""What can be written, and the endings of its file, the usual one first; a Hugging Face model is a folder."""
_BY_EXAMPLE = ("onnx", "torchscript")
"""Formats that an example of the model's inputs is needed for."""


def parser() -> FlagParser:
    """Return the parser of the verb."""
    parser = FlagParser(
        prog="phalanx export",
        usage="phalanx export RUN|CHECKPOINT [--format FORMAT] [-o PATH]",
        description="Write the best checkpoint of a run for other programs.",
    )
    parser.add_argument("run", metavar="RUN", help="a run (name, beginning of one, tag, folder, last) or a checkpoint")
    add_run_flags(parser, "onnx, torchscript: data for an example of the inputs")
    parser.add_argument("--format", metavar="|".join(FORMATS), help="[by the ending of --output, else safetensors]")
    text = "the file or folder [<run>.<ending>]"
    add_output_flag(parser, "-o", "--output", endings=(), metavar="PATH", help=text)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    namespace = parser().parse_all(arguments)
    kind = _format(namespace.format, namespace.output)
    from phalanx.run.export import export_model
    from phalanx.zoo.export import export_folder
    from phalanx.zoo.saved_run import load_run, open_run

    needs_example = kind in _BY_EXAMPLE
    if not needs_example and not namespace.model and (namespace.data or namespace.changes):
        raise UsageError(
            f"--{'data' if namespace.data else 'set'} is for {' and '.join(_BY_EXAMPLE)}, which need an example",
            hint=f"Leave it out: {kind} is written from the checkpoint alone.",
        )
    if needs_example or namespace.model:
        saved, data = open_run(**asked_of(namespace), needs_target=False)
    else:
        saved, data = load_run(namespace.run, checkpoint=namespace.checkpoint), None
    path = Path(namespace.output or saved.path.name + "".join(FORMATS[kind][:1]))
    check_output(path, "--output", force=namespace.force)
    augment = saved.trainer().augment if needs_example else None
    if kind == "hf":
        export_folder(saved.model, path, saved.recipe, saved.classes)
    else:
        export_model(saved.model, path, kind, data, augment)
    written = sum(file.stat().st_size for file in path.rglob("*")) if path.is_dir() else path.stat().st_size
    print(f"wrote {path} ({kind}, {size(written)}) from {saved.checkpoint}")
    return 0


def _format(format_name: str | None, output: str | None) -> str:
    """Return the format that was named, or that of the file's ending; refuse an ending of another one."""
    if format_name is not None and format_name not in FORMATS:
        raise UsageError(unknown_name("format", format_name, FORMATS))
    if output is None:
        return format_name or "safetensors"
    ending = Path(output).suffix
    if format_name is None:
        chosen = next((name for name, endings_of in FORMATS.items() if ending in endings_of[:1]), None)
        if chosen is None:
            problem = unknown_name(
                "ending", ending or "(none)", [endings_of[0] for endings_of in FORMATS.values() if endings_of]
            )
            hint = "A Hugging Face folder is written by --format hf."
            if ending == ".pt":
                hint = f"A TorchScript file: add --format torchscript. The weights: -o {Path(output).stem}.safetensors"
            raise UsageError(f"--output {output}: {problem}", hint=hint)
        return chosen
    if format_name != "hf" and ending not in FORMATS[format_name]:
        hint = f"Write: --output {Path(output).with_suffix(FORMATS[format_name][0])}"
        endings = " or ".join(FORMATS[format_name])
        raise UsageError(f"--output {output}: a file of the format {format_name} ends in {endings}", hint=hint)
    return format_name
