"""`ktmoe config`."""

from __future__ import annotations

import click

from ktmoe.cli import options, output
from ktmoe.config import config, show_config

HELP = """What this build and this CPU have.

What was compiled, what this CPU supports, what was chosen and why.
"""


@click.command("config", help=HELP)
@options.JSON
def command(as_json: bool) -> None:
    if as_json:
        output.print_json(config())
    else:
        show_config()
