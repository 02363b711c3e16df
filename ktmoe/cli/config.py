"""`ktmoe config`."""

from __future__ import annotations

import click

from ktmoe.cli import options, output
from ktmoe.config import config, show_config


@click.command("config", help="What was compiled, what this CPU supports, what was chosen and why.")
@options.JSON
def command(as_json: bool) -> None:
    if as_json:
        output.print_json(config())
    else:
        show_config()
