"""The command line's root: it knows the commands' names, and imports a command when it is called or listed."""

from __future__ import annotations

import importlib

import click

import ktmoe
from ktmoe.version import installed_version

#: The commands; each is `command` in the module of that name in this folder.
COMMANDS = ("config", "doctor", "inspect", "convert", "merge", "pack", "load", "bench", "demo", "chat", "serve", "accuracy")

EXIT_CODES = """\b
Exit codes:
  0    done
  1    an error, or a wrong result
  2    wrong usage
  130  interrupted by Ctrl-C
"""
UNITS = "1 GB is 1e9 bytes, 1 GFLOP is 1e9 multiplications and additions. NO_COLOR=1 turns colours off."


class Commands(click.Group):
    """Imports a command when it is needed, so that `ktmoe config` does not wait for what measures."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        return importlib.import_module(f"ktmoe.cli.{name}").command if name in COMMANDS else None

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for text in (EXIT_CODES, UNITS):
            formatter.write_paragraph()
            formatter.write_text(text)


def _version(ctx: click.Context, option: click.Option, asked: bool) -> None:
    if asked:
        click.echo(f"ktmoe {installed_version()}")
        ctx.exit()


@click.command(
    "ktmoe", cls=Commands, help=ktmoe.__doc__.partition("\n")[0], invoke_without_command=True, subcommand_metavar="COMMAND ..."
)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Print the version.")
@click.pass_context
def root(ctx: click.Context) -> None:
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(2)
