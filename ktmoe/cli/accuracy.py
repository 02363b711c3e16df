"""`ktmoe accuracy`: what activation modes change, in the perplexity of a text and in each layer."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import click

from ktmoe import progress_bar
from ktmoe.backends.choice import choose_backend
from ktmoe.cli import accuracy_report, engine, options, output
from ktmoe.cli.signals import signals_as_exit
from ktmoe.errors import InputError
from ktmoe.messages import printable
from ktmoe.modes import MODES

HELP = """Measure what activation modes change.

DIR is a checkpoint with its tokenizer, or a .gguf file; FILE is a text in UTF-8. The text's perplexity with each activation
mode stands beside the exact one, "bf16". So do the divergence of the next token's distribution from the exact one, and the
error that each mode adds in each layer. The modes run one after the other. It needs torch and transformers.
"""


@click.command("accuracy", help=HELP)
@options.MODEL
@click.option("--text", "file", metavar="FILE", required=True, type=options.PathType(), help="The text, UTF-8.")
@options.BACKEND
@click.option(
    "--activations",
    metavar="M,M",
    help=f"Modes to compare, such as mxfp4,mxfp8/mxfp4; by default those of {', '.join(MODES)} that the backend has.",
)
@click.option(
    "--rounding",
    type=click.Choice(["exact", "folded"]),
    default="exact",
    help="folded: also bf16 with weights that may be rounded to bfloat16.",
)
@click.option("--dense", metavar="NAME", default="packed", help="Such as int8 or torch: also bf16 with other dense matrices.")
@options.EXPERTS
@click.option("--tokens", metavar="N", type=click.IntRange(2), help="Take the text's first N tokens; by default all.")
@click.option(
    "--context",
    metavar="N",
    type=click.IntRange(2),
    default=512,
    show_default=True,
    help="Tokens of a window; a new one every N/2.",
)
@click.option("--layers/--no-layers", default=True, help="Also measure the error of each layer. On by default.")
@options.JSON
def command(
    model: str,
    file: str,
    backend: str,
    activations: str | None,
    rounding: str,
    dense: str,
    experts: str | None,
    tokens: int | None,
    context: int,
    layers: bool,
    as_json: bool,
) -> int:
    text = _read(Path(file).expanduser())
    modes = None if activations is None else activations.split(",")
    for mode in modes or ["auto"]:
        choose_backend(backend, None, mode)  # raises, before anything is loaded
    engine.start()
    from ktmoe.transformers.accuracy import accuracy
    from ktmoe.transformers.folder import model_folder
    from ktmoe.transformers.refusals import in_one_line

    # first, since a download draws bars of its own
    with ExitStack() as resources:
        resources.enter_context(signals_as_exit())
        resources.enter_context(in_one_line(model, "run"))
        folder = resources.enter_context(model_folder(model, everything=dense == "torch"))
        step = resources.enter_context(progress_bar.steps())
        found = accuracy(
            folder,
            text,
            backend=backend,
            activations=modes,
            rounding=rounding,
            dense=dense,
            experts=experts,
            tokens=tokens,
            context=context,
            layers=layers,
            step=step,
        )
    if as_json:
        output.print_json({"path": printable(model), "text": printable(file), **accuracy_report.data(found)})
    else:
        accuracy_report.show(found)
    return 1 if any(layer.of_bound > 1 for layer in found.layers) else 0


def _read(file: Path) -> str:
    """Raises InputError if the file cannot be read, is empty or not UTF-8."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise InputError(f"{file}: expected a file with a text, found {error.strerror}") from None
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: expected text in UTF-8, found byte {data[error.start]:#04x} at {error.start}") from None
    if not text.strip():
        raise InputError(f"{file}: expected a text, found {'white space alone' if text else 'an empty file'}")
    return text
