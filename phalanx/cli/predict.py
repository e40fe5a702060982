"""`phalanx predict`: a trained model's outputs for data, or the continuation of a text."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.cli.evaluate import DataParser, add_run_flags
from phalanx.cli.flags import add_config_flags
from phalanx.cli.json_output import add_json_flag, add_output_flag

_HELP = """Show the predictions of a run's best checkpoint, one row per sample, in the order of the data.

Reads data as the run read its own: rows of a table (the target may be missing), one image, or images in any folder.
For a classifier, shows the row, the file of an image, the class, its name and probability; for other models, the
output. Prints a table; --output writes a file. A language model continues --prompt."""


def parser() -> DataParser:
    """Return the parser of the verb."""
    usage = "phalanx predict RUN|CHECKPOINT [DATA ... | --data DATA | --prompt TEXT] [-o FILE] [options]"
    parser = DataParser(prog="phalanx predict", usage=usage, description=_HELP)
    add_run_flags(parser, "what to predict for")
    text = "a file to write: .jsonl or .csv; .npy and .pt hold the outputs"
    add_output_flag(parser, "-o", "--output", endings=(".jsonl", ".csv", ".npy", ".pt"), help=text)
    parser.add_argument("--raw", action="store_true", help="the model's outputs as they are, instead of classes")
    add_json_flag(parser, "the rows")
    parser.add_argument("--prompt", metavar="TEXT", help="a text for a language model to continue")
    parser.add_argument("--max-tokens", type=int, default=200, metavar="N", help="tokens to add to --prompt [200]")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="X", help="0: the most likely token [0.8]")
    add_config_flags(parser)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    namespace = parser().parse_all(arguments)
    from phalanx.cli.predictions import predict  # with torch, which help and mistakes do not need

    return predict(namespace)
