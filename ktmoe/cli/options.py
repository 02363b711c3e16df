"""Options and arguments that commands share, and the types of their values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import click

from ktmoe.backends.base import TUNED_FOR as TUNED_FOR_NAMES
from ktmoe.loaders import naming
from ktmoe.modes import MODES


class PathType(click.ParamType):
    """A path; an empty one, such as an unset variable of a shell, would mean the current folder."""

    name = "path"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        return value if value != "" else self.fail("expected a path, found an empty text", param, ctx)


MODEL = click.argument("model", metavar="DIR", type=PathType())
OUT = click.argument("out", metavar="OUT", type=PathType())
BACKEND = click.option("--backend", metavar="NAME", default="auto", help="By default the best that runs here.")
ACTIVATIONS = click.option(
    "--activations",
    metavar="MODE",
    default="auto",
    help=f"One of {', '.join(MODES)}, or X/H such as mxfp8/mxfp4; by default the backend's own, bf16 or int16.",
)
TUNED_FOR = click.option(
    "--tuned-for",
    type=click.Choice(TUNED_FOR_NAMES),
    default="decode",
    help="Which kernel to take where weights have one for few tokens and one for many; decode by default.",
)
THREADS = click.option(
    "--threads", metavar="N", type=click.IntRange(1), help="Threads of ktmoe; by default one a physical core."
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else, to stdout.")
TOP_K = click.option(
    "--top-k", metavar="K", type=click.IntRange(1), help="Experts of a token; by default what the checkpoint says."
)
SECONDS = click.option(
    "--seconds", metavar="S", type=click.FloatRange(0, 3600), default=2.0, show_default=True, help="To measure each row for."
)


CACHE = click.option(
    "--cache", metavar="OUT", type=PathType(), help="A folder that `ktmoe pack` has made of DIR: its weights are mapped."
)
EXPERTS = click.option(
    "--experts",
    metavar="FILE",
    type=PathType(),
    help="Another checkpoint of the model, such as a .gguf file: the routed experts are read from there, the rest from DIR.",
)
DENSE = click.option(
    "--dense",
    metavar="NAME",
    default="packed",
    help="Who computes matrices that are no expert's: packed (ktmoe, exactly), torch, or a format that ktmoe rounds them to, "
    "such as int8. By default packed.",
)


class _Gigabytes(click.FloatRange):
    """Bytes, for a number of gigabytes."""

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail("expected a number, found nan", param, ctx)
        return max(1, round(number * 1e9))


def shard_bytes(default: int) -> Callable:
    """--shard-gb, as shard_bytes."""
    return click.option(
        "--shard-gb",
        "shard_bytes",
        metavar="GB",
        type=_Gigabytes(0, 1e6, min_open=True),
        default=default / 1e9,
        show_default=True,
        help="The largest size of a file. After an interruption, the unfinished file is written anew.",
    )


#: The name of a layer that is not a number alone.
_LAYER_NAME = re.compile(r"[A-Za-z_][\w.]*\.[0-9]{1,9}", re.ASCII)


class LayerType(click.ParamType):
    """A layer: 3 for "3", "mtp.0" for "mtp.0"."""

    name = "layer"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        layer = _layer(value) if isinstance(value, str) else value
        return self.fail(f"expected a number or a name such as mtp.0, found {value!r}", param, ctx) if layer is None else layer


def _layer(text: str) -> int | str | None:
    key = naming.layer_key(text)
    return key if isinstance(key, int) or _LAYER_NAME.fullmatch(key) else None


class Layers(click.ParamType):
    """Layers: [0, 1, 2, 3, 7, "mtp.0"] for "0-3,7,mtp.0"."""

    name = "layers"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> list[int | str]:
        if not isinstance(value, str):
            return value
        layers: list[int | str] = []
        for item in value.split(","):
            first, dash, last = item.partition("-")
            if dash and first.isdecimal() and last.isdecimal() and int(first) <= int(last) < 10**6:
                layers += range(int(first), int(last) + 1)
            elif (layer := _layer(item)) is not None:
                layers.append(layer)
            else:
                self.fail(f"expected numbers, ranges such as 0-3 and names such as mtp.0, found {item!r}", param, ctx)
        return layers


class Numbers(click.ParamType):
    """Numbers: [0, 1] for "0,1"."""

    name = "numbers"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        if not isinstance(value, str):
            return value
        items = value.split(",")
        if not all(item.isdecimal() and item.isascii() and len(item) < 10 for item in items):
            self.fail(f"expected numbers such as 0,1, found {value!r}", param, ctx)
        return [int(item) for item in items]


NUMA_NODES = click.option("--numa-nodes", metavar="0,1", type=Numbers(), help="By default all that can be used.")
LAYER = click.option(
    "--layer", metavar="L", type=LayerType(), help="Its number, or a name such as mtp.0; by default the first."
)
