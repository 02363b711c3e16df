"""What goes to stdout: JSON for programs, or text. Progress and errors go to stderr."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable

import click


def print_json(data: dict) -> None:
    """Print one object as JSON. A number that JSON does not know, such as infinity, becomes null."""
    click.echo(json.dumps(_finite(data), indent=2, allow_nan=False))


def print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        click.echo(line)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
