"""`ktmoe accuracy`: what activation modes or rounded weights change, in the perplexity of a text and in each layer."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import click
from click.core import ParameterSource

from ktmoe import progress_bar
from ktmoe.backends.choice import choose_backend
from ktmoe.cli import accuracy_layers, accuracy_report, engine, options, output
from ktmoe.cli.signals import signals_as_exit
from ktmoe.errors import InputError
from ktmoe.messages import printable
from ktmoe.modes import MODES

HELP = """Measure what activation modes, or rounded weights, change.

DIR is a checkpoint with its tokenizer, or a .gguf file; FILE is a text in UTF-8. The text's perplexity with each activation
mode stands beside the exact one, "bf16". So do the divergence of the next token's distribution from the exact one, and the
error that each mode adds in each layer. The modes run one after the other. It needs torch and transformers.

With --against, DIR is compared with the original that its weights were rounded from, in the same quantities. Without --text,
--against compares the experts of each layer on random inputs. That needs no torch.
"""

#: What only a run of a text has.
_OF_TEXT = ("activations", "rounding", "dense", "tokens", "context", "layers")


@click.command("accuracy", help=HELP)
@options.MODEL
@click.option(
    "--text", "file", metavar="FILE", type=options.PathType(), help="The text, UTF-8. Only --against can do without it."
)
@click.option(
    "--against",
    "original",
    metavar="DIR2",
    type=options.PathType(),
    help="The original, from which DIR's weights were rounded: what does that cost?",
)
@options.BACKEND
@click.option(
    "--activations",
    metavar="M,M",
    help=f"Modes to compare, such as mxfp4,mxfp8/mxfp4; by default those of {', '.join(MODES)} that the backend has, or bf16 "
    "alone with --against.",
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
@click.pass_context
def command(
    context_of_call: click.Context,
    model: str,
    file: str | None,
    original: str | None,
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
    _check_usage(context_of_call, file, original, rounding)
    if file is None:
        accuracy_layers.compare(model, experts, original, backend, as_json)
        return 0
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
        against = None if original is None else resources.enter_context(model_folder(original))
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
            against=against,
            step=step,
        )
    if as_json:
        paths = {"path": printable(model), "against": original and printable(original), "text": printable(file)}
        output.print_json({**paths, **accuracy_report.data(found)})
    else:
        accuracy_report.show(found, [] if original is None else [f"original: {original}", f"rounded: {model}"])
    return 1 if any(layer.of_bound > 1 for layer in found.layers) else 0


def _check_usage(call: click.Context, file: str | None, original: str | None, rounding: str) -> None:
    """Raise UsageError for options that do not go together."""
    if file is None and original is None:
        raise click.UsageError("Missing option '--text', or '--against'")
    if original is not None and rounding != "exact":
        raise click.UsageError("--against excludes --rounding folded")
    given = [name for name in _OF_TEXT if call.get_parameter_source(name) != ParameterSource.DEFAULT]
    if file is None and given:
        raise click.UsageError(f"--{given[0] if given[0] != 'layers' else 'layers/--no-layers'} needs --text")


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
