"""`ktmoe accuracy DIR --against DIR2` without a text: what rounding costs each layer, on random inputs."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ktmoe import progress_bar
from ktmoe.cli import measurements, output
from ktmoe.loaders.naming import listed
from ktmoe.measuring.rounding_cost import EXPERTS, TOKENS, RoundedLayer, rounding_cost
from ktmoe.messages import printable

_DEFINITIONS = (
    f"weights: root mean square of the error beside that of the original's weights, of up to {EXPERTS} experts",
    "outputs: ||y - y of the original|| / ||y of the original||, and the largest of a token;",
    f"  {TOKENS} tokens of random numbers go to random experts: with --text each layer gets what a text gives it",
)


def compare(model: str, experts: str | None, original: str, backend: str, as_json: bool) -> None:
    """experts: where the rounded experts are, if not in the model."""
    with progress_bar.steps() as step, step("compare layers") as draw:
        found = rounding_cost(experts or model, original, backend, progress=draw)
    if as_json:
        output.print_json(_data(model, original, found))
    else:
        _show(model, original, found)


def _show(model: str, original: str, found: list[RoundedLayer]) -> None:
    drawn = Table(box=SIMPLE_HEAD)
    drawn.add_column("layer")
    for head in ("weights", "outputs", "largest"):
        drawn.add_column(head, justify="right")
    for layer in found:
        errors = (layer.weights, layer.outputs.relative, layer.outputs.largest)
        drawn.add_row(str(layer.layer), *(f"{error:.1e}" for error in errors))
    console = measurements.console()
    console.print(drawn)
    formats: dict[tuple[str, str], list[int | str]] = {}
    for layer in found:
        formats.setdefault((layer.original_formats, layer.formats), []).append(layer.layer)
    lines = [f"original: {printable(original)}", f"rounded: {printable(model)}", *_DEFINITIONS]
    lines += [f"{listed(layers)}: {exact}, rounded: {rounded}" for (exact, rounded), layers in formats.items()]
    measurements.print_text(console, lines)


def _data(model: str, original: str, found: list[RoundedLayer]) -> dict:
    return {
        "path": printable(model),
        "against": printable(original),
        "text": None,
        "sampled_tokens": TOKENS,
        "layers": [
            {
                "layer": layer.layer,
                "formats": layer.formats,
                "original_formats": layer.original_formats,
                "weights_relative_error": layer.weights,
                "relative_error": layer.outputs.relative,
                "largest_relative_error": layer.outputs.largest,
            }
            for layer in found
        ],
    }
